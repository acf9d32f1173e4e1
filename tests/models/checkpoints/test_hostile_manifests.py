"""Hostile manifests: each tensor's parts must cover the tensor once, and must be the files' parts."""

import itertools
import random
import time

import pytest
import torch
from weft.models import Llama, from_pretrained, initialize, save_pretrained
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.manifest import ITEM_BYTES, DamagedCheckpoint, coverage_error
from weft.models.checkpoint.shards import STORED_DTYPES
from weft.models.checkpoint.states import load_checkpoint

from .strangers import CONFIG, NORM, change_manifest, write_folders


@pytest.fixture
def folder(tmp_path):
    return write_folders(tmp_path)


def parts(*boxes):
    """A change of a manifest: the norm's parts, as offsets and shapes."""

    def change(holds):
        (part,) = holds["tensors"][NORM]["parts"]
        holds["tensors"][NORM]["parts"] = [part | {"offsets": start, "shape": shape} for start, shape in boxes]

    return change


def part_says(**fields):
    return lambda holds: holds["tensors"][NORM]["parts"][0].update(fields)


def tensor_says(**fields):
    return lambda holds: holds["tensors"][NORM].update(fields)


@pytest.mark.parametrize("use", ["convert", "from_pretrained", "load_checkpoint"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(parts(), "0 parts do not cover", id="no-part"),
        pytest.param(parts(([0], [8])), "1 parts do not cover", id="half"),
        pytest.param(parts(([0], [8]), ([4], [12])), "2 parts do not cover", id="overlap"),
        pytest.param(parts(([0], [16]), ([0], [16])), "2 parts do not cover", id="twice"),
        pytest.param(parts(([8], [16])), "reaches beyond", id="out-of-bounds"),
        pytest.param(parts(([-8], [16])), "reaches beyond", id="negative-offset"),
        pytest.param(parts(([0, 0], [16, 1])), "does not fit a tensor of shape", id="other-rank"),
        pytest.param(parts(([0], [2**62])), "reaches beyond", id="huge-part"),
        pytest.param(tensor_says(shape=[2**70]), "not the shape of a tensor", id="huge-tensor"),
        pytest.param(tensor_says(shape=["16"]), "a whole number is needed", id="size-of-text"),
        pytest.param(tensor_says(shape=[16.0]), "a whole number is needed", id="size-of-float"),
        pytest.param(tensor_says(dtype="F31"), "F31", id="dtype"),
        pytest.param(tensor_says(dtype="F16"), "F16", id="another-dtype-than-the-file"),
        pytest.param(part_says(file="../model/model.safetensors"), "not among the listed files", id="file-outside"),
        pytest.param(part_says(file="config.json"), r"config\.json", id="another-file"),
        pytest.param(part_says(sum=-1), "sum -1", id="sum"),
        pytest.param(part_says(sum="1"), "a whole number is needed", id="sum-of-text"),
        pytest.param(lambda holds: holds.update(tensors=[]), "an object is needed", id="no-tensors"),
        pytest.param(lambda holds: holds.update(optimizer={"kind": 3, "groups": 1}), "a string is needed", id="kind"),
        pytest.param(
            lambda holds: holds["files"].update({"../model/config.json": {"nbytes": 1, "sha256": ""}}),
            "a plain name within the folder is needed",
            id="listed-outside",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(folder, use, change, message):
    change_manifest(folder / "checkpoint", change)
    with pytest.raises(DamagedCheckpoint, match=message):
        if use == "convert":
            convert(folder / "checkpoint", folder / "out")
        elif use == "from_pretrained":
            from_pretrained(folder / "checkpoint")
        else:
            load_checkpoint(Llama(CONFIG), folder / "checkpoint")
    assert not (folder / "out").exists()


def boxes_of(shape, cuts):
    """The grid of boxes between cuts of each dim."""
    sides = [list(itertools.pairwise([0, *sorted(each), size])) for each, size in zip(cuts, shape, strict=True)]
    return [
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        for box in itertools.product(*sides)
    ]


def covers_once(shape, boxes):
    """Counts coverage element by element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        counts[place] += 1
    return bool((counts == 1).all())


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (0, 3), (4, 6), (3, 1, 5), (2, 3, 2, 2)],
    ids=lambda shape: "x".join(map(str, shape)) or "number",
)
def test_a_cover_is_told_from_all_else_as_by_counting(shape):
    draw = random.Random(str(shape))
    seen = set()
    for _ in range(150):
        boxes = boxes_of(
            shape, [draw.sample(range(1, size), draw.randrange(size)) if size > 1 else [] for size in shape]
        )
        match draw.randrange(4):
            case 0:
                boxes.pop(draw.randrange(len(boxes)))
            case 1:
                boxes.append(draw.choice(boxes))
            case 2 if shape:  # a part as large as before, at another place
                at = draw.randrange(len(boxes))
                _, sizes = boxes[at]
                boxes[at] = tuple(draw.randint(0, size - part) for size, part in zip(shape, sizes, strict=True)), sizes
            case 3:
                draw.shuffle(boxes)
        expected = covers_once(shape, boxes)
        seen.add(expected)
        assert (coverage_error(shape, boxes) is None) == expected, boxes
    assert seen == ({True} if 0 in shape else {True, False})


def test_a_cover_that_no_grid_makes_is_a_cover():
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert coverage_error((3, 3), pinwheel) is None
    assert coverage_error((3, 3), pinwheel[:-1]) is not None


def test_many_parts_are_checked_in_seconds():
    boxes = boxes_of((512, 512), [range(4, 512, 4), range(4, 512, 4)])
    start = time.process_time()
    assert len(boxes) == 2**14 and coverage_error((512, 512), boxes) is None
    assert coverage_error((512, 512), boxes[1:]) is not None
    assert time.process_time() - start < 5


def test_dtypes_of_manifests_are_those_of_files():
    assert {name: dtype.itemsize for name, dtype in STORED_DTYPES.items()} == ITEM_BYTES


@pytest.mark.parametrize("says", [{"dtype": "BF16"}, {"dtype": "F16"}, {"shape": [4, 4]}, {"shape": [8]}], ids=str)
def test_checksums_of_another_tensor_are_refused(tmp_path, says):
    model = Llama(CONFIG)
    initialize(model, seed=0)
    save_pretrained(model, tmp_path / "model")

    def change(holds):
        tensor = holds["tensors"][NORM]
        tensor |= says
        tensor["parts"][0] |= {"offsets": [0] * len(tensor["shape"]), "shape": tensor["shape"]}

    change_manifest(tmp_path / "model", change, "checksums.json")
    with pytest.raises(DamagedCheckpoint, match=rf"{NORM} as .* and checksums\.json as"):
        from_pretrained(tmp_path / "model")
