"""Turns text into token shards: in parts, by several processes; an interrupted run can be continued."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..processes import ProcessFailed, run_together
from ..safe_files import as_type
from ..versions import versions
from .contents import Contents, Texts, Unusable
from .inputs import Columns, InputPart, LeftOut, newest_time
from .manifest import (
    MANIFEST,
    TOKENIZER_FOLDER,
    DataManifest,
    TokenShard,
    boundary_tokens,
    check_request,
    digest_of,
    read_manifest,
    read_record,
    write_record,
    write_whole,
)
from .shards import write_shard
from .tokenizer import TOKENIZER_FILE, Tokenizer

if TYPE_CHECKING:
    from .examples.example import Task
    from .examples.template import ChatTemplate

PART_BYTES = 64 << 20  # input for a shard: some 30 MB of tokens, for which a process needs about 1 GB of memory
PROGRESS = "progress.json"
UNUSABLE, STOPPED = 3, 4  # exit statuses of a worker process: unusable input; unwritable output
POLL_SECONDS = 0.2

Progress = Callable[[int, int], None]  # (bytes read, bytes of all inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of a preparation, sent to every worker process."""

    parts: tuple[InputPart, ...]
    contents: Contents
    tokenizer: Tokenizer
    dtype: str  # of tokens
    output: Path
    request: str  # the digest of the request and of the inputs' modification times


def prepare(
    inputs: Sequence[Path],
    output: Path,
    *,
    tokenizer: Tokenizer,
    columns: Columns | None = None,
    bos: bool | None = None,
    eos: bool = True,
    task: Task = "pretrain",
    template: ChatTemplate | None = None,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
    progress: Progress = lambda done, total: None,
) -> DataManifest:
    """Make a folder of token shards, or continue an unfinished folder.

    The bytes are the same for any number of workers and of restarts. The manifest is written last: a folder with a
    manifest is complete. Documents without text, and files of a folder without text, are left out and counted. An
    output folder within an input is not read as input.
    bos, eos: the tokens around each document, see `boundary_tokens`; kept in the manifest's request.
    task: except for pretrain, the inputs are records of examples; of columns, bos and eos, only columns.skip_bad is
        then used. template: the chat template of messages; None: for records of text alone.
    columns: None: the defaults of `Columns`.
    workers: processes; two or more are started by multiprocessing's forkserver, for which a program must guard the
        main module.
    part_bytes: bytes of input for each shard, about. progress: called while inputs are read; see `Progress`.
    Raises ValueError for unusable input, for an output with different contents or in use by a second process, and where
    the output cannot be written.
    """
    contents = _contents(task, tokenizer, columns or Columns(), bos, eos, template)
    parts = contents.find_parts(inputs, part_bytes, output)
    request = _request(inputs, parts, contents, tokenizer, part_bytes)
    times = [piece.path.stat().st_mtime_ns for part in parts for piece in part]
    expected_progress = {"request": request, "modified": hashlib.sha256(json.dumps(times).encode()).hexdigest()}
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    job = _Job(
        parts=tuple(parts),
        contents=contents.dated(newest_time(parts)),
        tokenizer=tokenizer,
        dtype=dtype,
        output=output,
        request=digest_of(expected_progress),
    )
    try:
        with _claim(job, expected_progress) as manifest:
            if manifest is None:
                try:
                    _make_shards(job, workers, progress)
                except Unusable:
                    shutil.rmtree(output)  # no command could continue this folder
                    raise
                manifest = _finish(job, request)
    except OSError as error:
        raise _write_error(output, error) from None
    for number in range(len(parts)):
        _record(output, number).unlink(missing_ok=True)
    (output / PROGRESS).unlink(missing_ok=True)
    return manifest


def _contents(
    task: Task, tokenizer: Tokenizer, columns: Columns, bos: bool | None, eos: bool, template: ChatTemplate | None
) -> Contents:
    if task == "pretrain":
        return Texts(columns, boundary_tokens(tokenizer, bos=bos, eos=eos), tokenizer)
    from .examples.encode import ExampleRecords

    return ExampleRecords(task, tokenizer, template, columns.skip_bad)


def _request(
    inputs: Sequence[Path], parts: Sequence[InputPart], contents: Contents, tokenizer: Tokenizer, part_bytes: int
) -> dict[str, Any]:
    """The manifest's `request`: everything that determines the bytes of the result."""
    pieces = [
        [str(piece.path), piece.start, piece.stop, piece.kind.value, piece.passed] for part in parts for piece in part
    ]
    return {
        "inputs": [str(path) for path in inputs],
        "pieces": hashlib.sha256(json.dumps(pieces).encode()).hexdigest(),
        **contents.request(),
        "part_bytes": part_bytes,
        "end": tokenizer.end,
        "tokenizer": {name: hashlib.sha256(content).hexdigest() for name, content in tokenizer.files},
        "versions": {
            "weft-models": versions()["weft-models"],
            **({} if tokenizer.is_bytes else {"tokenizers": version("tokenizers")}),
        },
    }


def _write_error(output: Path, error: OSError) -> ValueError:
    reason = error.strerror or str(error)
    if not output.is_dir():
        return ValueError(f"the output folder {output} cannot be made: {reason}; give another --output")
    where = f"{output}: {error.filename}" if error.filename not in (None, str(output)) else str(output)
    return ValueError(f"the output folder {where}: {reason}; once that is mended, the same command goes on")


@contextmanager
def _claim(job: _Job, expected_progress: dict[str, Any]) -> Iterator[DataManifest | None]:
    """Inside, the output folder exists and is this process's alone. Yields the manifest of a complete folder, or None.

    expected_progress: the content of progress.json for this preparation.
    Raises ValueError where another process has the folder, or where the folder holds anything but this preparation.
    """
    output, request = job.output, expected_progress["request"]
    output.mkdir(parents=True, exist_ok=True)
    folder = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{output} is being prepared by another process; wait for it, or give another --output"
            ) from None
        if (output / MANIFEST).exists():
            existing = read_manifest(output)
            if existing.request != request:
                raise ValueError(
                    f"{output} holds other data, prepared from {_describe_request(existing.request)}; give another "
                    f"--output"
                )
            yield existing
            return
        for partial in output.glob(f".{PROGRESS}.partial-*"):
            partial.unlink()  # of a process killed while writing
        if (output / PROGRESS).exists():
            saved = _read_progress(output)
            if saved is None:
                if not any(_finished_shard(job, number) for number in range(len(job.parts))):
                    raise ValueError(
                        f"{output / PROGRESS} is not as it was written; remove {output}, or give another --output"
                    )
                write_record(output / PROGRESS, expected_progress)
            elif saved != expected_progress:
                other = f"of {_describe_request(saved['request'])}"
                changed = "the inputs have changed since" if saved["request"] == request else other
                raise ValueError(
                    f"{output} holds the beginning of another preparation: {changed}; remove {output}, "
                    f"or give another --output"
                )
            for partial in (*output.glob(".*.partial-*"), *(output / TOKENIZER_FOLDER).glob(".*.partial-*")):
                partial.unlink()
        elif any(output.iterdir()):
            raise ValueError(f"the output folder {output} exists and holds something else; give another --output")
        else:
            write_record(output / PROGRESS, expected_progress)
        yield None
    finally:
        os.close(folder)


def _read_progress(output: Path) -> dict[str, Any] | None:
    """The content of a folder's progress.json; None where the file is damaged."""
    saved = read_record(output / PROGRESS)
    try:
        check_request(as_type(dict[str, Any], (saved or {}).get("request"), PROGRESS))
    except ValueError:
        return None
    return saved


def _describe_request(request: dict[str, Any]) -> str:
    return f"{', '.join(request['inputs'])} by tokenizer {request['tokenizer'][TOKENIZER_FILE][:8]}"


def _make_shards(job: _Job, workers: int, progress: Progress) -> None:
    """Make the missing shards, with `workers` processes."""
    sizes = [sum(piece.nbytes for piece in part) for part in job.parts]
    missing = [number for number in range(len(job.parts)) if _finished_shard(job, number) is None]
    total, finished = sum(sizes), sum(sizes) - sum(sizes[number] for number in missing)
    progress(finished, total)
    if min(workers, len(missing)) <= 1:
        for number in missing:
            _make_shard(job, number, lambda done, finished=finished: progress(finished + done, total))  # type: ignore[misc]
            finished += sizes[number]
        return
    with tempfile.TemporaryDirectory(prefix="weft-prepare-") as name:
        folder = Path(name)
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                progress(
                    min(total, finished + sum(int(each.read_text() or 0) for each in folder.glob("read-*"))), total
                )

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            run_together(
                *(_make_missing_shards, job, missing, name),
                processes=min(workers, len(missing)),
                folder=folder,
                preload=[__name__],
            )
        except ProcessFailed as failure:
            if failure.status not in (UNUSABLE, STOPPED):
                raise
            kind = Unusable if failure.status == UNUSABLE else ValueError
            raise kind((folder / "error").read_text(encoding="utf-8")) from None
        finally:
            ended.set()
            watching.join()
    progress(total, total)


def _make_missing_shards(rank: int, job: _Job, missing: Sequence[int], folder: str) -> None:
    """Make missing shards not yet begun by any process, until none is left. Run by each worker process."""
    read = 0

    def report(done: int) -> None:
        (Path(folder) / f"read-{rank}").write_text(str(read + done))

    for number in missing:
        try:
            os.close(os.open(Path(folder) / f"begun-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        try:
            _make_shard(job, number, report)
        except (Unusable, OSError) as error:
            message = error if isinstance(error, ValueError) else _write_error(job.output, error)
            (Path(folder) / "error").write_text(str(message), encoding="utf-8")
            sys.exit(UNUSABLE if isinstance(error, Unusable) else STOPPED)
        read += sum(piece.nbytes for piece in job.parts[number])


def _make_shard(job: _Job, number: int, report: Callable[[int], None]) -> None:
    """Write the files of a part's shard, and last the shard's `_record`."""
    part, left_out = job.parts[number], LeftOut(empty=0, skipped=[], bad=0, passed=[])
    size = sum(piece.nbytes for piece in part)
    entries = job.contents.entries(part, left_out)
    record = write_shard(
        job.output,
        number,
        entries,
        left_out,
        task=job.contents.task,
        dtype=job.dtype,
        report=lambda read: report(min(read, size)),
    )
    write_record(_record(job.output, number), {"of": job.request, "shard": asdict(record)})
    report(size)


def _record(output: Path, number: int) -> Path:
    """The path of the file recording that a shard is complete, until the manifest is written."""
    return output / f"part-{number:05}.json"


def _finished_shard(job: _Job, number: int) -> TokenShard | None:
    """The entry of a complete shard of this preparation; None for a shard still to be made."""
    record = read_record(_record(job.output, number))
    if record is None or record.get("of") != job.request:
        return None
    try:
        shard = as_type(TokenShard, record.get("shard"), "the record")
        shard.check_files(job.contents.task)
        shard.check_sizes(job.output, job.dtype)
    except ValueError:
        return None
    return shard


def _finish(job: _Job, request: dict[str, Any]) -> DataManifest:
    """Write the tokenizer's files, and last the manifest. Raises ValueError where no shard has a document."""
    shards = [shard for number in range(len(job.parts)) if (shard := _finished_shard(job, number)) is not None]
    if len(shards) < len(job.parts):
        raise ValueError(f"{job.output} was changed while it was made; the same command goes on")
    if not sum(shard.documents for shard in shards):
        shutil.rmtree(job.output)
        raise ValueError(_describe_nothing(request["inputs"], shards, job.contents.task))
    folder = job.output / TOKENIZER_FOLDER
    folder.mkdir(exist_ok=True)
    for name, content in job.tokenizer.files:
        write_whole(folder / name, content)
    manifest = DataManifest(
        dtype=job.dtype,
        vocab_size=job.tokenizer.vocab_size,
        end=job.tokenizer.end,
        tokenizer=job.tokenizer.sha256,
        task=job.contents.task,
        shards=tuple(shards),
        request=request,
    )
    manifest.write(job.output)
    return read_manifest(job.output)


def _describe_nothing(inputs: Sequence[str], shards: Sequence[TokenShard], task: Task) -> str:
    """An error for inputs without a document, or without an example."""
    empty, bad = (sum(getattr(shard, name) for shard in shards) for name in ("empty", "bad"))
    skipped = sum(len(shard.skipped) for shard in shards)
    if task != "pretrain":
        return (
            f"{', '.join(inputs)} hold no example of {task}: {empty} blank lines, {skipped} files without records, "
            f"{bad} bad records; give files of records"
        )
    return (
        f"{', '.join(inputs)} hold no text: {empty} empty documents, {skipped} files that are not UTF-8, {bad} lines "
        f"without text; give files with text"
    )
