"""`weft convert`: a run's checkpoint to a folder for transformers, and back, with one tensor at a time in memory."""

from __future__ import annotations

import json
import weakref
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weft.models import (
    GPT,
    GPTConfig,
    from_pretrained,
    initialize,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)
from weft.models.checkpoint import convert as converting
from weft.models.checkpoint import shards, tensors
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.manifest import MODEL, Manifest
from weft.models.cli import main
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.checkpoints.states import CASES, Case, fill_state, make
from tests.models.folders import CLASSES, close, their_model, their_saved, tokens_for
from tests.support.pool import Pool


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", CLASSES)
def test_there_and_back_is_the_same(kind: str, tmp_path: Path) -> None:
    theirs = their_model(kind, ("tied",) if kind == "qwen2" else ())
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    convert(tmp_path / "theirs", tmp_path / "checkpoint", shard_bytes=20_000)
    assert len(list((tmp_path / "checkpoint").glob("part-*"))) > 1
    convert(tmp_path / "checkpoint", tmp_path / "again", shard_bytes=20_000)
    assert (tmp_path / "again/model.safetensors.index.json").exists()
    tokens = tokens_for(theirs)
    ours = [from_pretrained(tmp_path / name).eval()(tokens) for name in ("checkpoint", "theirs")]
    assert torch.equal(*ours)
    close(their_saved(tmp_path / "again")(tokens).logits, theirs(tokens).logits)
    for folder in ("checkpoint", "again"):
        assert json.loads((tmp_path / folder / "tokenizer.json").read_text()) == {"model": {"type": "BPE"}}


TOKENIZER = {  # each of another content
    **dict(byte_tokenizer().files),
    "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}',
    "added_tokens.json": b"{}",
    "chat_template.jinja": b"{% for m in messages %}{{ m.content }};{% endfor %}",
    "vocab.json": b'{"a": 0}',
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.model": b"\x0a\x00",
    "generation_config.json": b'{"eos_token_id": 256, "temperature": 0.5}',
}
CODE = {"modeling_llama.py": b"raise SystemExit", "training_args.bin": b"\x80\x02.", "README.md": b"# A model\n"}


def test_all_that_stands_beside_the_weights_goes_along_or_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There and back; files that could run code are left out."""
    import transformers

    their_model("llama", vocab_size=257).save_pretrained(tmp_path / "theirs")
    for name, content in {**TOKENIZER, **CODE, ".hidden": b""}.items():
        (tmp_path / "theirs" / name).write_bytes(content)
    (tmp_path / "theirs/runs").mkdir()
    for source, target, left_out in (
        ("theirs", "checkpoint", "README.md, modeling_llama.py, runs, training_args.bin"),
        ("checkpoint", "again", None),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(["convert", str(tmp_path / source), str(tmp_path / target)])
        _, *said = capsys.readouterr().out.splitlines()
        assert said == ([f"left out {left_out}: neither weights nor of a tokenizer in this folder"] if left_out else [])
        for name, content in TOKENIZER.items():
            assert (tmp_path / target / name).read_bytes() == content, name
    weights = {"config.json", "model.safetensors", "checksums.json"}
    assert {path.name for path in (tmp_path / "again").iterdir()} == weights | TOKENIZER.keys()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "hi;"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "again").eos_token_id == 256


@pytest.mark.few(1)
@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_killed_conversion_does_not_block_the_next(direction: str, tmp_path: Path) -> None:
    model, _ = make(Case())
    save_checkpoint(model, tmp_path / "checkpoint")
    save_pretrained(model, tmp_path / "folder")
    source = tmp_path / ("checkpoint" if direction == "there" else "folder")
    convert(source, tmp_path / "whole")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/part-00007.safetensors").write_bytes(b"half")
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(source), str(tmp_path / "out")])
    found, wanted = ({p.name: p.read_bytes() for p in (tmp_path / each).iterdir()} for each in ("out", "whole"))
    assert found == wanted
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("direction", ["there", "back"])
def test_two_at_once_into_one_folder_are_refused(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second conversion is refused while the first writes its weights; the first then completes."""
    model, _ = make(Case())
    save_checkpoint(model, tmp_path / "checkpoint")
    save_pretrained(model, tmp_path / "folder")
    source = tmp_path / ("checkpoint" if direction == "there" else "folder")
    write, said = shards.write_safetensors, list[str]()

    def meanwhile(*arguments: Any) -> Any:
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(source), str(tmp_path / "out")])
        said.append(capsys.readouterr().err)
        return write(*arguments)

    for module in (converting, tensors):
        monkeypatch.setattr(module, "write_safetensors", meanwhile)
    convert(source, tmp_path / "out")
    assert said == [
        f"weft convert: {tmp_path}/out is being made by another process; wait for it, or give another OUT\n"
    ]
    for (name, found), (_, wanted) in zip(
        from_pretrained(tmp_path / "out").named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(found, wanted), name


def ran(
    folder: Path, *, last: int | None = None, done: float = 1.0, saved: tuple[int, ...] = (), ended: bool = True
) -> dict[str, float]:
    """A run's folder. Returns the first weight of the final model and of each checkpoint's, by folder name.

    last, done: step and share in the last line of metrics.jsonl; without a step there is no such file.
    """
    folder.mkdir()
    (folder / "config.toml").touch()
    found: dict[str, float] = {}
    for name in [f"checkpoint-{step}" for step in saved] + ["checkpoint"] * ended:
        model, _ = make(Case(), seed=len(found) + 1)
        found[name] = next(model.parameters()).flatten()[0].item()
        if name == "checkpoint":
            save_pretrained(model, folder / name, tokenizer=byte_tokenizer())
        else:
            save_checkpoint(model, folder / name)
    if last is not None:
        line = {"step": last, "done": done, "loss": 1.0, "tokens_per_second": 1.0, "held_out_loss": None}
        (folder / "metrics.jsonl").write_text(f"{json.dumps({**line, 'step': last - 1})}\n{json.dumps(line)}\n")
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("run", "taken"),
    [
        pytest.param({"last": 120}, "checkpoint", id="without-checkpoints"),
        pytest.param({}, "checkpoint", id="without-metrics"),
        pytest.param({"last": 120, "saved": (50, 100)}, "checkpoint", id="ended-after-its-last-checkpoint"),
        pytest.param({"last": 100, "saved": (50, 100)}, "checkpoint-100", id="ended-with-a-checkpoint"),
        pytest.param({"last": 105, "done": 0.5, "saved": (100,)}, "checkpoint-100", id="went-on-and-was-stopped"),
        pytest.param({"last": 105, "done": 0.5, "saved": (100,), "ended": False}, "checkpoint-100", id="stopped"),
    ],
)
def test_a_run_becomes_a_folder_for_transformers(
    run: dict[str, Any], taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has the run's last model, in whichever form the model was saved."""
    values = ran(tmp_path / "run", **run)
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "run"), str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said == f"{tmp_path}/out will be a folder for transformers, from {tmp_path}/run/{taken}\n"
    for model in (their_saved(tmp_path / "out"), from_pretrained(tmp_path / "out")):
        assert next(model.parameters()).flatten()[0].item() == values[taken]


def test_a_conversion_is_announced_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(tmp_path / "run", saved=(3,), last=3)

    def stops(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    for name in ("convert", "copy_folder"):
        monkeypatch.setattr(converting, name, stops)
    for source, said in {
        "run": "a folder for transformers, from {}/run/checkpoint-3",
        "run/checkpoint-3": "a folder for transformers, from {}/run/checkpoint-3",
        "run/checkpoint": "a checkpoint, from {}/run/checkpoint",
    }.items():
        with pytest.raises(SystemExit, match="130"):
            main(["convert", str(tmp_path / source), str(tmp_path / "out")])
        assert capsys.readouterr().out == f"{tmp_path}/out will be {said.format(tmp_path)}\n"


def test_a_copy_is_there_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path / "run")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/half").touch()
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "run"), str(tmp_path / "out")])
    found, wanted = (
        {p.name: p.read_bytes() for p in folder.iterdir()} for folder in (tmp_path / "out", tmp_path / "run/checkpoint")
    )
    assert found == wanted
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(tmp_path / "run"), str(tmp_path / "out")])
    assert capsys.readouterr() == ("", f"weft convert: {tmp_path}/out exists; give another folder, or remove it\n")


def save(case: Case, folder: Path) -> None:
    model, optimizer = make(case, seed=1)
    fill_state(model, optimizer, 1)
    save_checkpoint(model, folder, optimizer)


@pytest.mark.exhaustive
def test_a_checkpoint_of_many_ranks_converts_as_one_process_exports(tmp_path: Path, pool: Pool) -> None:
    case = CASES["zero1-dp2-tp2"]
    pool.run(save, case, tmp_path / "run/checkpoint-3", ranks=case.ranks)
    save_pretrained(make(Case(), seed=1)[0], tmp_path / "exported")
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "run"), str(tmp_path / "converted")])
    with (
        safe_open(tmp_path / "exported/model.safetensors", framework="pt") as wanted,
        safe_open(tmp_path / "converted/model.safetensors", framework="pt") as found,
    ):
        assert sorted(found.keys()) == sorted(wanted.keys())
        for name in wanted.keys():  # noqa: SIM118  it is no mapping
            assert torch.equal(found.get_tensor(name), wanted.get_tensor(name))
    ours, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("converted", "exported"))
    assert ours == theirs


def test_a_converted_folder_is_a_beginning(tmp_path: Path) -> None:
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "begin")
    model = from_pretrained(tmp_path / "theirs")
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(model, tmp_path / "begin", optimizer)
    assert not optimizer.state
    tokens = tokens_for(theirs)
    close(model(tokens), theirs(tokens).logits)


class Alive(TorchDispatchMode):
    """Counts the bytes of all living tensors that ops take or return, each storage once; `most` is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen += [weakref.ref(each) for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
        alive = [each for ref in self._seen if (each := ref()) is not None]
        self._seen = list(map(weakref.ref, alive))
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive if each.is_cpu}
        self.most = max(self.most, sum(storages.values()))
        return result


def converted_at_most(source: Path, target: Path) -> int:
    """Peak bytes of living tensors during a conversion."""
    with Alive() as alive:
        convert(source, target)
    return alive.most


SMALL = 32_000  # bytes of a thousand elements as words, their weights and products, by which the sums are taken


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken of a thousand elements at once, not of a million: of more than these tensors have."""
    monkeypatch.setattr(shards, "_BLOCK", 1 << 10)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_at_once")
def test_no_more_than_a_tensor_and_what_is_read_of_it_is_in_memory(tmp_path: Path) -> None:
    """For GPT-2, where queries, keys and values are parts of one transposed tensor, the largest of the file."""
    model = GPT(
        GPTConfig(vocab_size=50, hidden_size=128, num_layers=3, num_heads=2, max_seq_len=16, intermediate_size=128)
    )
    initialize(model, 0)
    save_checkpoint(model, tmp_path / "checkpoint")
    part = model.get_parameter("h.0.attn.q_proj.weight").nbytes
    there = converted_at_most(tmp_path / "checkpoint", tmp_path / "theirs")
    assert 3 * part < there <= 3 * part + part + SMALL
    back = converted_at_most(tmp_path / "theirs", tmp_path / "back")
    assert part < back <= part + 3 * part + SMALL  # the file's tensor is memory-mapped: the system may drop its pages
    for name, each in from_pretrained(tmp_path / "back").named_parameters():
        assert torch.equal(each, model.get_parameter(name)), name


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_at_once")
def test_of_what_many_ranks_saved_a_part_is_in_memory_beside_the_tensor(tmp_path: Path, pool: Pool) -> None:
    case = CASES["zero1-dp2-tp2"]
    pool.run(save, case, tmp_path / "checkpoint", ranks=case.ranks)
    found = converted_at_most(tmp_path / "checkpoint", tmp_path / "theirs")
    tensors = Manifest.read(tmp_path / "checkpoint").tensors
    largest = max((each for name, each in tensors.items() if name.startswith(MODEL)), key=lambda each: prod(each.shape))
    part = max(prod(each.shape) for each in largest.parts)
    assert part < prod(largest.shape)
    assert 4 * prod(largest.shape) < found <= 4 * (prod(largest.shape) + part) + SMALL


def test_a_refused_conversion_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for source, said in {
        "nowhere": "is neither a checkpoint nor a folder for transformers",
        "empty": "is neither a checkpoint nor a folder for transformers",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(tmp_path / source), str(tmp_path / "out")])
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="of no family"):
        convert(tmp_path / "other", tmp_path / "out")
