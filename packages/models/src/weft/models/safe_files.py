"""Reads files from untrusted sources, and writes files into folders where other users may plant links.

Reading: plain files only, and JSON only into values of declared types. Every JSON file that the package reads goes
through `read_json` or `parse_json`, every TOML file through `parse_toml`. Writing: never through a symbolic link.
Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

# The most bytes of a file. The largest in use are manifests: about 150 bytes for each part of a tensor.
LARGEST = 256 * 2**20
# The most bytes of a file's name, on the file systems in use.
_LONGEST_NAME = 255
# The most dots of a name in a TOML file. Options have at most three, numbers of a chip at most four.
_MOST_DOTS = 8
# The most characters of a name or value in an error.
_SHOWN = 60


def read_plain(path: Path, *, limit: int = LARGEST) -> bytes:
    """The content of a plain file, or of the plain file behind a link.

    limit: the most bytes.
    Raises ValueError for a folder, a pipe, a device or a larger file; FileNotFoundError for an absent file; OSError
    for an unreadable file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no plain file; give a plain file, or a link to one")
        if found.st_size > limit:
            raise ValueError(f"{path} has {found.st_size:,} bytes, and {limit:,} are read at most; check the file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)  # not read(limit), which would allocate `limit` bytes
    finally:
        os.close(descriptor)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON file with an object at the top level.

    remedy: how the error ends.
    Raises ValueError for a missing file, a path that is no plain file, a file that is not JSON, and JSON without an
    object at the top level.
    """
    try:
        content = read_plain(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    return parse_json(content, str(path), remedy)


def parse_json(content: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Parses JSON with an object at the top level. where: the file, for errors. Raises ValueError as `read_json`."""
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{where} nests too deeply to be read; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {_article(value)}, not an object; {remedy}")
    return value


def parse_toml(content: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Parses TOML. where: the file, for errors. remedy: how the error about many dots or brackets ends.

    Raises ValueError for bytes that are not TOML, for deep brackets, and for a name with more than 8 dots: tomllib
    would take minutes for a name with thousands.
    """
    try:
        text = content.decode("utf-8")
        if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines()):
            raise RecursionError
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{where} nests too deeply to be read; {remedy}") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number with more digits than Python reads
        raise ValueError(f"{where} is not TOML: {error}") from None


def check_plain_name(name: str, where: str) -> None:
    """Raises ValueError unless `name` may name a file directly in a folder: no path, no leading dot, 1 to 255 bytes.

    where: the place that names the file, for the error. Whether there is a file of this name is not checked.
    """
    nbytes = len(name.encode("utf-8", "surrogatepass"))
    plain = PurePosixPath(name).name == name and not name.startswith(".") and "\0" not in name and "\\" not in name
    if not (plain and 0 < nbytes <= _LONGEST_NAME):
        raise ValueError(f"{where} names the file {name[:_SHOWN]!r}; a plain name within the folder is needed")


def links_outside(path: Path) -> bool:
    """Whether a file is a link out of its folder, except a link into the blobs of a Hugging Face cache.

    By a link out, a folder from elsewhere could bring any file of this machine into a saved model or a copy. Tokenizer
    files behind such links are skipped, and chat templates and folders to copy are refused. Weights are read; `convert`
    then warns.
    A cache has snapshots/REVISION/NAME as a link into blobs. If the folder itself is a link, the folder behind the
    link counts.
    """
    if not path.is_symlink() and not path.parent.is_symlink():
        return False
    folder, target = path.parent.resolve(), path.resolve()
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    return not any(target.is_relative_to(home) for home in homes)


def as_type(kind: type[T], value: object, where: str) -> T:
    """Converts a parsed JSON value to `kind`: a dataclass, tuple, mapping with string keys, union or plain type.

    Objects become dataclasses, with a value for each field without default; lists become tuples.
    where: the file and the place in the file, for errors.
    Raises ValueError for a value of the wrong type, a missing field and an unknown field.
    """
    return cast(T, _as_type(kind, value, where))


def _as_type(kind: Any, value: object, where: str) -> object:
    if dataclasses.is_dataclass(kind):
        return _as_dataclass(cast(type, kind), value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in arguments:
            if _is_of(each, value):
                return _as_type(each, value, where)
    elif origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            if arguments[0] in (int, str, bool) and all(type(each) is arguments[0] for each in value):
                return tuple(value)
            return tuple(_as_type(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
        if len(value) == len(arguments):
            pairs = zip(arguments, value, strict=True)
            return tuple(_as_type(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(pairs))
    elif isinstance(value, dict) and origin is not None and _is_of(kind, value):
        return {name: _as_type(arguments[1], each, f"{where}.{name[:_SHOWN]}") for name, each in value.items()}
    elif origin in (None, Literal) and _is_of(kind, value):
        return float(value) if kind is float and isinstance(value, int) else value
    raise ValueError(f"{where} is {_article(value)}, and {_expected(kind)} is needed")


def _as_dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_article(value)}, and an object is needed")
    types = types_of(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{where} has {unknown[0][:_SHOWN]!r}; known are {', '.join(fields)}")
    missing = (name for name, field in fields.items() if name not in value and _is_needed(field))
    if (name := next(missing, None)) is not None:
        raise ValueError(f"{where} has no {name!r}")
    return kind(**{name: _as_type(types[name], each, f"{where}.{name}") for name, each in value.items()})


def types_of(kind: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields, by name, for callers that convert a single field with `as_type`."""
    return _types_of(kind)


@lru_cache(maxsize=64)
def _types_of(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_of(kind: Any, value: object) -> bool:
    """Whether the outermost type of a JSON value fits `kind`. A bool is no number."""
    if kind is Any:
        return True
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    origin = get_origin(kind) or kind
    if origin is tuple:
        return isinstance(value, list)
    if origin in (dict, Mapping):
        return isinstance(value, dict)
    if isinstance(value, bool):
        return origin is bool
    if origin is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    if origin is Literal:
        return isinstance(value, type(get_args(kind)[0]))  # the class with the field compares the values
    return isinstance(value, origin)


def _expected(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", NoneType: "null"}
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_expected, get_args(kind)))
    if origin is tuple:
        lengths = "" if get_args(kind)[-1] is Ellipsis else f" of {len(get_args(kind))}"
        return f"a list{lengths}"
    if origin is Literal:
        return _expected(type(get_args(kind)[0]))
    return names.get(kind, "an object")


def _article(value: object) -> str:
    """A description of a JSON value for errors: the value itself if short."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float() | str():
            shown = repr(value) if not isinstance(value, int) or abs(value) < 10**_SHOWN else "a number of many digits"
            return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"


def write_anew(path: Path, content: bytes) -> None:
    """Write a hidden temporary file beside `path`, then rename it to `path`, replacing any file or link there.

    Until the rename the old file is untouched.
    Raises OSError if the file cannot be written.
    """
    aside = path.with_name(f".{path.name}")
    try:
        with os.fdopen(_new_file(aside), "wb") as file:
            file.write(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Make and remove the temporary file of `write_anew`, before the work whose result is the file.

    Raises OSError if the folder takes no file of this name.
    """
    aside = path.with_name(f".{path.name}")
    os.close(_new_file(aside))
    aside.unlink()


def _new_file(path: Path) -> int:
    """The descriptor of a new file, in place of a file left by a killed process."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_shared(path: Path, content: bytes) -> None:
    """As `write_anew`, for a file that several processes, on any machine, may write at once: the last file is kept.

    Called for the table of a precomputed reference, which several runs on the same data may write. A killed process may
    leave its hidden temporary file behind.
    """
    with _written_aside(path, content) as aside:
        aside.replace(path)


def write_first(path: Path, content: bytes) -> None:
    """As `write_shared`, but the first file is kept.

    Raises FileExistsError for a file or link at `path`, which stays as it is. A file system without hard links cannot
    refuse the second file: `path` is looked at just before the rename, and two processes that look at the same moment
    both rename. The later file is then kept.
    """
    with _written_aside(path, content) as aside:
        try:
            os.link(aside, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            aside.replace(path)


@contextmanager
def _written_aside(path: Path, content: bytes) -> Iterator[Path]:
    """Context with a hidden temporary file of the content, beside `path`; removed at the end unless renamed."""
    aside = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def append(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Append to a file, which is made if missing. sync: return only when the whole file is on the disk.

    Raises OSError if the file cannot be written, or is a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "ab") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
