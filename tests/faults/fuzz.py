"""Damaged files of every kind, read by every door: `python -m tests.faults.fuzz --count 1000 --seed 7` prints findings.

A door is a command or a library call that reads files. Each case damages one file of a door's input, opens the door
in a forked child with limits on time and memory, and judges the result. A case ends well in one of two ways:

- status 0, with every tensor and every document that was written present in the damaged input;
- status 2, with one printable line on stderr and no output.

Any other end is a finding: a traceback, a signal, more than 10 seconds of processor time, more than 2 GB, or a byte
written outside the output.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tests.faults.mutations import damage
from tests.models.metrics import some_metrics

CPU_SECONDS = 10
WALL_SECONDS = 60  # wall time, for a child that waits without using a processor, as on a pipe
BYTES = 2 * 10**9
SECRET = "what lies beside the input"
CRASHED = 70  # the status of a child that ended with a traceback


@dataclass(frozen=True)
class Door:
    """A way in for files.

    source: the folder of undamaged files. open: reads `in`, and may write `out`, both in the working folder.
    """

    source: str
    open: Callable[[], None]
    writes_tensors: bool = False
    writes_documents: bool = False


def _weft(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        from weft.models.cli import main

        main(arguments)

    return run


def _adapters() -> None:
    from weft.models import from_pretrained, load_lora

    try:
        load_lora(from_pretrained("in/base"), "in/adapters")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


DOORS = {
    "convert-folder": Door("folder", _weft("convert", "in", "out"), writes_tensors=True),
    "convert-own-folder": Door("own-folder", _weft("convert", "in", "out"), writes_tensors=True),
    "convert-checkpoint": Door("checkpoint", _weft("convert", "in", "out"), writes_tensors=True),
    "generate": Door("folder", _weft("generate", "in", "--prompt", "a", "--tokens", "2")),
    "generate-checkpoint": Door("checkpoint", _weft("generate", "in", "--prompt", "a", "--tokens", "2")),
    "adapters": Door("adapted", _adapters),
    "prepare": Door(
        "texts", _weft("data", "prepare", "in", "--output", "out", "--workers", "1"), writes_documents=True
    ),
    "verify": Door("prepared", _weft("data", "verify", "in")),
    "prepare-examples": Door(
        "records", _weft("data", "prepare", "in", "--task", "dpo", "--output", "out", "--workers", "1")
    ),
    "verify-examples": Door("prepared-examples", _weft("data", "verify", "in")),
    "show-examples": Door("prepared-examples", _weft("data", "show", "in")),
    "train-on-prepared": Door("prepared", _weft("train", "--data.path", "in", "--print-config")),
    "train-by-config": Door("run", _weft("train", "--config", "in/config.toml", "--print-config")),
    "resume": Door("run", _weft("train", "--output", "in", "--resume", "--print-config")),
}


def make_sources(home: Path) -> None:
    """Whole files for every door, in folders of `home` by their names."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    from weft.models import Llama, LlamaConfig, initialize, lora, save_checkpoint, save_lora, save_pretrained
    from weft.models.cli import main
    from weft.models.data.tokenizer import byte_tokenizer

    config = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    model = Llama(config)
    initialize(model, seed=0)
    save_pretrained(model, home / "own-folder", tokenizer=byte_tokenizer())
    save_pretrained(model, home / "folder", shard_bytes=20_000, tokenizer=byte_tokenizer())
    (home / "folder" / "checksums.json").unlink()  # as a folder that another program wrote
    (home / "folder" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256], "do_sample": True}))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    save_checkpoint(model, home / "checkpoint", optimizer, run={"step": 1}, tokenizer=byte_tokenizer())
    save_pretrained(model, home / "adapted" / "base")
    save_lora(lora(model, 2, 4.0, ["layers.*.self_attn.q_proj"]), home / "adapted" / "adapters")
    texts = home / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40)))
    (texts / "b.txt").write_text("a text of several lines\nand words\n" * 40)
    with contextlib.suppress(ImportError):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": ["one", "two", "three"] * 20})
        # Uncompressed: the texts are in the file as they are.
        pyarrow.parquet.write_table(table, texts / "c.parquet", compression="none")
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["data", "prepare", str(texts), "--output", str(home / "prepared"), "--workers", "1"])
    (records := home / "records").mkdir()
    pairs = (
        {"prompt": f"question {i} ", "chosen": f"answer {i}", "rejected": "none", "label": True} for i in range(40)
    )
    (records / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    judged = home / "judged.jsonl"
    judged.write_text(
        "".join(json.dumps({"prompt": "a", "completion": f"{i}", "label": i % 2}) + "\n" for i in range(9))
    )
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["data", "prepare", str(judged), "--task", "kto", "--output", f"{home}/prepared-examples"])
    _make_run(home / "run", texts / "b.txt")


def _make_run(folder: Path, text: Path) -> None:
    """The folder of a run that stopped after step 2 of 4, with a checkpoint."""
    import torch
    from weft.mesh import ProcessMesh
    from weft.models import ParallelPlan, save_checkpoint
    from weft.models.data.sources import find_data
    from weft.models.data.tokenizer import byte_tokenizer
    from weft.models.families import make_model
    from weft.models.train.config import DataConfig, MeshConfig
    from weft.models.train.recipes import recipe
    from weft.models.train.results import Results
    from weft.models.train.run import Run
    from weft.models.train.saved_run import describe_run

    small = recipe("llama-tiny")
    config = replace(
        small,
        steps=4,
        save_every=2,
        check=False,
        data=DataConfig(path=text, batch_size=2, sequence_length=16),
        mesh=MeshConfig(dp=1, tp=1),
        model=replace(small.model, num_layers=1, hidden_size=32, intermediate_size=48),
    )
    run = Run(recipe="llama-tiny", config=config, corpus=find_data(text), dp=1, tp=1, folder=folder)
    model = make_model(config.model)
    with Results(folder, writes=True) as results:
        results.begin("llama-tiny", config, ParallelPlan(), ProcessMesh.grid(dp=1, tp=1), [])
        for step in (1, 2):
            results.add(some_metrics(step=step, done=step / 4))
        described = describe_run(run, 2, 5.5, results.logged)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(model, folder / "checkpoint-2", optimizer, run=described, tokenizer=byte_tokenizer())


@dataclass(frozen=True)
class Ended:
    """The result of a case. finding: the error found, or None."""

    door: str
    file: str
    damage: str
    status: int
    said: str
    finding: str | None


def try_case(door: str, sources: Path, random: Random, folder: Path) -> Ended:
    """Damage a file of the door's input in `folder`, open the door, and judge the result."""
    source = sources / DOORS[door].source
    shutil.copytree(source, folder / "in", symlinks=True)
    (folder / "secret").mkdir()
    (folder / "secret" / "secret.txt").write_text(SECRET)
    shutil.copytree(sources / "own-folder", folder / "secret", dirs_exist_ok=True)
    files = [path for path in sorted((folder / "in").rglob("*")) if path.is_file()]
    damaged = random.choice(files)
    done = damage(damaged, random)
    before = _contents(folder)
    status, said = _in_a_child(DOORS[door].open, folder)
    finding = _judge(DOORS[door], folder, status, said, before, _contents(folder))
    return Ended(door, str(damaged.relative_to(folder / "in")), done, status, said, finding)


def _in_a_child(call: Callable[[], None], folder: Path) -> tuple[int, str]:
    """Call in a forked child with limits; returns its status, negative for a signal, and its stderr."""
    said = folder / "said"
    child = os.fork()
    if child == 0:
        status = CRASHED
        try:
            os.chdir(folder)
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            try:
                call()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    until = time.monotonic() + WALL_SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    _, status = os.waitpid(child, 0)
    text = said.read_text(errors="replace") if said.exists() else ""
    said.unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(status), text


def _judge(
    door: Door, folder: Path, status: int, said: str, before: dict[str, str], after: dict[str, str]
) -> str | None:
    """The error in a case's result, or None."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status == CRASHED:
        return "ended in a traceback"
    if status not in (0, 2):
        return f"ended with status {status}"
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if outside := sorted(name for name in changed if not name.startswith("out/")):
        return f"changed {outside[0]}"
    if status == 2:
        if len(said.splitlines()) != 1 or not said.endswith("\n"):
            return f"said {len(said.splitlines())} lines"
        if not said[:-1].isprintable():
            return "wrote control characters to the terminal"
        if left := [name for name in after if name.startswith("out/") and "progress" not in name]:
            return f"left {left[0]} behind"
        return None
    if any(SECRET in text for text in _texts(folder / "out")):
        return "published what lies outside of the input"
    if door.writes_tensors:
        there = {tensor for path in (folder / "in").rglob("*.safetensors") for tensor in _tensors(path)}
        made = [tensor for path in (folder / "out").rglob("*.safetensors") for tensor in _tensors(path)]
        if not made:
            return "wrote no tensors"
        if not there.issuperset(made):
            return "wrote numbers that are not in the input"
    if door.writes_documents:
        known = list(_documents_of(folder / "in"))
        made = _prepared(folder / "out")
        if not made:
            return "wrote no documents"
        if strange := next((each for each in made if not any(each == there for there in known)), None):
            return f"wrote a document that is not in the input: {strange[:40]!r}"
    return None


def _contents(folder: Path) -> dict[str, str]:
    """By path, the digest of each file; for a link or another kind of entry, its description."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[name] = "no plain file"
    return found


def _texts(folder: Path) -> Iterator[str]:
    yield from (path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class _Within:
    """Equals every document contained in `content`, the bytes of an uncompressed Parquet file."""

    content: bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes) and other in self.content


def _documents_of(folder: Path) -> Iterator[bytes | _Within]:
    """The documents of the folder's files, read by hand."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        content = path.read_bytes()
        if path.suffix == ".parquet":
            yield _Within(content)
        elif path.suffix == ".jsonl":
            for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    yield json.loads(line)["text"].encode()
        else:
            yield content.removeprefix(b"\xef\xbb\xbf")


def _prepared(folder: Path) -> list[bytes]:
    """The documents of a prepared folder whose tokens are bytes, of 16 bits each, and 256 after each."""
    documents, pending = [], bytearray()
    for path in sorted(folder.glob("tokens-*.bin")):
        for token in memoryview(path.read_bytes()).cast("H"):
            if token == 256:
                documents.append(bytes(pending))
                pending.clear()
            else:
                pending.append(token)
    assert not pending, "each document has an end"
    return documents


def _tensors(path: Path) -> Iterator[bytes]:
    """The bytes of each tensor of a safetensors file, read by hand."""
    if not path.is_file():
        return
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        for name, each in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                start, stop = each["data_offsets"]
                yield content[8 + size + start : 8 + size + stop]


def run_cases(count: int, seed: int, doors: list[str]) -> tuple[Counter[str], list[Ended]]:
    """How many cases ended in each way, and the findings. Case k of a seed is the same whatever the count."""
    counts: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as home:
        sources = Path(home) / "sources"
        sources.mkdir()
        make_sources(sources)
        for case in range(count):
            random = Random(f"{seed} {case}")
            folder = Path(home) / "case"
            folder.mkdir()
            ended = try_case(doors[case % len(doors)], sources, random, folder)
            shutil.rmtree(folder)
            counts["wrong" if ended.finding else "refused" if ended.status else "read"] += 1
            if ended.finding:
                findings.append(ended)
                last = ended.said.strip().splitlines()[-1:] or [""]
                print(
                    f"case {case}: {ended.door}, {ended.file}: {ended.damage!r}: {ended.finding}: {last[0][:200]!r}",
                    flush=True,
                )
    return counts, findings


def told(seed: int, count: int, doors: int, counts: Counter[str]) -> str:
    """How many cases ended in each way, in a line."""
    ways = ", ".join(f"{counts[way]} {way}" for way in ("read", "refused", "wrong"))
    return f"fuzz: seed {seed}, {count} cases of {doors} doors: {ways}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", choices=DOORS, action="append")
    given = parser.parse_args()
    doors = given.door or list(DOORS)
    counts, findings = run_cases(given.count, given.seed, doors)
    print(told(given.seed, given.count, len(doors), counts))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
