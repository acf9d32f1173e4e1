"""The order of samples: a keyed permutation, a mixture's turns, and batches independent of mesh, rank and restart."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models.data.batches import Batches, Rows, SourceTurns, permute
from weft.models.data.prepare import prepare
from weft.models.data.sources import Data, find_data, parse_mixture
from weft.models.data.streams import ShardStream, TextStream, split
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer

T, BATCH = 8, 16


@pytest.mark.parametrize("counts", [range(1, 70), [255, 256, 257, 1000]], ids=["few", "many"])
def test_a_permutation_takes_every_place_once(counts: range | list[int]) -> None:
    for count in counts:
        for key in (0, 1, 2**64 - 1):
            assert sorted(permute(place, count, key) for place in range(count)) == list(range(count))


def test_a_permutation_leaves_no_order_and_each_key_has_its_own() -> None:
    """Neighbours, and a place under two keys, are on average a third of the 4,000 places apart, as by chance."""
    count = 4000
    one, two = (
        np.array([permute(place, count, derive_key(0, "order", n)) for place in range(count)]) for n in range(2)
    )
    for apart in (np.diff(one), one - two, one - np.arange(count)):
        assert abs(np.abs(apart).mean() / count - 1 / 3) < 0.02
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05


def test_a_place_among_many_is_found_without_a_list_of_them() -> None:
    assert 0 <= permute(10**15 + 7, 2**50 + 1, 5) <= 2**50


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(["1"], id="one"),
        pytest.param(["0.7", "0.3"], id="two"),
        pytest.param(["3", "1", "1"], id="not-of-sum-one"),
        pytest.param(["0.5", "0.25", "0.2", "0.05"], id="four"),
        pytest.param(["1", "1", "1", "1", "1", "1", "94"], id="one-of-many"),
        pytest.param(["1/3", "2/7", "1/11"], id="fractions"),
    ],
)
def test_of_any_number_of_samples_each_source_has_its_share_rounded(weights: list[str]) -> None:
    shares = [Fraction(weight) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    turns = SourceTurns([Fraction(weight) for weight in weights])
    taken = Counter[int]()
    for sample in range(700):
        source, number = turns(sample)
        assert number == taken[source]  # each source's samples are numbered in turn
        taken[source] += 1
        for each, share in enumerate(shares):
            assert abs(taken[each] - share * (sample + 1)) < 1
    far = 10**15 * 3  # nothing is counted on the way there
    source, number = turns(far)
    assert abs(number - shares[source] * far) < 1


def test_weights_that_never_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match="repeat after 1000000 samples, above 100000; give weights of fewer digits"):
        SourceTurns([Fraction("0.123457"), Fraction("0.876543")])


@pytest.fixture(autouse=True)
def disk_that_needs_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of this disk may take longer than all else here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """130 documents, each a letter repeated 5 to 40 times."""
    for number in range(130):
        folder = tmp_path / "books" / f"{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.txt").write_text(chr(ord("a") + number % 26) * (5 + number * 7 % 36))
    return tmp_path / "books"


@pytest.fixture
def prepared(books: Path, tmp_path: Path) -> Path:
    prepare([books], tmp_path / "prepared", tokenizer=byte_tokenizer(), part_bytes=1200)
    return tmp_path / "prepared"


@pytest.fixture(params=["text", "prepared", "mixture"])
def data(request: pytest.FixtureRequest, books: Path, prepared: Path) -> Data:
    if request.param == "mixture":
        return find_data(None, [f"{books / '0'}=0.7", f"{prepared}=0.3"])
    return find_data(books if request.param == "text" else prepared)


def batches(data: Data, *, seed: int = 1, packed: bool = True) -> Batches:
    return Batches(data, sequence_length=T, batch_size=BATCH, seed=seed, packed=packed)


def both(rows: Rows) -> torch.Tensor:
    assert rows.positions is not None and rows.documents is not None
    return torch.stack((rows.tokens, rows.targets, rows.positions, rows.documents), -1)  # [rows, T, 4]


MESHES = [
    {"dp": 1},
    {"dp": 2},
    {"dp": 4},
    {"dp": 8},
    {"dp": 3},
    {"dp": 2, "cp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"cp": 4},
]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()))
def test_anchor_32_paddlenlp_9412_data_is_in_one_order_on_every_mesh_and_each_rank_reads_its_own_alone(
    data: Data, mesh: dict[str, int], microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as the trainer requests them, with a new reader for each rank and step, as after a restart."""
    whole = batches(data)
    rows = BATCH // microbatches
    layout = Layout(ProcessMesh.grid(**mesh), {"dp": Shard(0)} if "dp" in mesh else {})
    read: list[tuple[int, int]] = []
    for kind in (TextStream, ShardStream):
        own = kind.read
        monkeypatch.setattr(
            kind, "read", lambda self, start, stop, own=own: read.append((start, stop)) or own(self, start, stop)
        )
    for step in (0, 3, 1000):
        expected = both(whole.batch(step, slice(None)))
        assert expected.shape == (BATCH, T, 4)
        for number in range(microbatches):
            found: dict[int, torch.Tensor] = {}
            for rank in layout.mesh.ranks:
                part = layout.local_slices((rows, T), rank)[0]
                del read[:]
                mine = both(batches(data).batch(step, slice(number * rows + part.start, number * rows + part.stop)))
                assert len(read) == part.stop - part.start
                assert all(stop - start == T + 1 for start, stop in read)
                found.setdefault(part.start, mine)
                assert torch.equal(found[part.start], mine)  # ranks along cp and tp read the same rows
            laid = torch.cat([found[start] for start in sorted(found)])
            assert torch.equal(laid, expected[number * rows : (number + 1) * rows])


def test_another_seed_and_another_epoch_have_another_order(data: Data) -> None:
    one, other = (both(batches(data, seed=seed).batch(0, slice(None))) for seed in (1, 2))
    assert not torch.equal(one, other)
    made = batches(data, packed=False)
    steps = -(-made.num_samples // BATCH)
    assert not torch.equal(made.batch(0, slice(None)).tokens, made.batch(steps, slice(None)).tokens)


def test_an_epoch_visits_every_sample_once(prepared: Path) -> None:
    made = batches(find_data(prepared), packed=False)
    count, row = made.num_samples, 0
    epochs: list[list[tuple[int, ...]]] = [[], []]
    for step in range(-(-2 * count // BATCH)):
        for tokens in made.batch(step, slice(None)).tokens.tolist():
            if row < 2 * count:
                epochs[row // count].append(tuple(tokens))
            row += 1
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("length", [4, 8, 30])
def test_documents_that_are_held_out_are_held_out_whole(books: Path, length: int) -> None:
    """No token of theirs is trained on, as a target either."""
    files = sorted(books.rglob("*.txt"))
    ends = list(accumulate(file.stat().st_size + 1 for file in files))
    found = split(find_data(books).open(), length)
    documents = {bisect_right(ends, place) for start in found.held_out for place in range(start, start + length)}
    trained = {
        place
        for i in range(len(found.trained))
        for place in range(found.trained.start(i), found.trained.start(i) + length + 1)
    }
    assert not documents & {bisect_right(ends, place) for place in trained}
    held = sum(files[document].stat().st_size + 1 for document in documents)
    assert 0 < held < ends[-1] / 10
    assert len(trained) > ends[-1] * 0.8
    assert max(documents) - min(documents) > 65  # from all over the text


def test_a_packed_row_says_where_documents_begin(prepared: Path) -> None:
    """The starts follow from the end tokens in the row."""
    made = Batches(find_data(prepared), sequence_length=64, batch_size=BATCH, seed=1, packed=True)
    rows = made.batch(0, slice(None))
    assert rows.positions is not None and rows.documents is not None
    seen = 0
    for tokens, positions, documents in zip(
        rows.tokens.tolist(), rows.positions.tolist(), rows.documents.tolist(), strict=True
    ):
        position = document = 0
        for place, token in enumerate(tokens):
            assert (positions[place], documents[place]) == (position, document)
            position += 1
            if token == BYTE_END:
                position, document, seen = 0, document + 1, seen + 1
    assert seen > 2 * BATCH


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        pytest.param(["books"], "'books' in data.mixture is not FOLDER=WEIGHT with a weight above 0", id="no-weight"),
        pytest.param(["books=0"], "'books=0' in data.mixture is not", id="zero"),
        pytest.param(["books=much"], "'books=much' in data.mixture is not", id="no-number"),
        pytest.param(["books=1e999999999"], "'books=1e999999999' in data.mixture is not", id="many-digits"),
        pytest.param(["books=1/0"], "'books=1/0' in data.mixture is not", id="by-zero"),
        pytest.param(["books=-1"], "'books=-1' in data.mixture is not", id="below-zero"),
        pytest.param(["books=1", "code=2", "books/=1"], "books/ is given twice in data.mixture", id="twice"),
        pytest.param(["nowhere=1"], "nowhere does not exist", id="missing"),
    ],
)
def test_a_mixture_that_is_none_is_refused(mixture: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_data(None, mixture)


def test_a_mixture_and_a_path_are_not_both_given(books: Path) -> None:
    with pytest.raises(ValueError, match="both given; give one of the two"):
        find_data(books, [f"{books}=1"])


@pytest.mark.parametrize("weight", ["1", "0.7", "2/3", "1e-2", "5E+1", ".5"])
def test_weights_are_numbers_as_people_write_them(weight: str) -> None:
    assert parse_mixture(None, [f"books={weight}"]) == [(Path("books"), Fraction(weight))]
