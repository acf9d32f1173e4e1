"""Checks of config fields, of options, and of the degrees of parallelism that divide heads.

Each check raises a ValueError with the field, the value and the remedy. The checks of sizes, counts, probabilities and
choices also name the class of the config. The checks with a parameter `where` are called from `__post_init__` of the
classes in train/config.py; `where` is the option group named in errors ("data", "mesh", ...).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from numbers import Integral
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from weft.mesh.extension import is_number

LARGEST = 2**31 - 1  # upper bound of the counts and sizes of a run: steps, sequences, tokens, ...

# Layers of a model, and heads of a layer: far above any published model's. Each layer becomes a module, so a number of
# layers without a bound could fill the memory.
MOST_LAYERS = 100_000
MOST_ELEMENTS = 2**40  # of one tensor: torch counts the tensor's bytes in 64 bits
MOST_NEW_TOKENS = 2**24  # of a row in `generate`, which allocates memory for all before drawing the first


class SplitSizes(Protocol):
    """The properties of a `ModelConfig` that `check_tensor_parallel` reads."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism."""


def check_drawing(
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    use_cache: bool = True,
    ends: Sequence[int] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises ValueError for an option of `generate` that is out of range or of another kind, as "1" for a number.

    names: of options in the error, by parameter, where they differ from the parameter's.
    """
    checks = (
        (
            "max_new_tokens",
            max_new_tokens,
            _is_whole(max_new_tokens) and 0 <= max_new_tokens <= MOST_NEW_TOKENS,
            f"a whole number, 0 or more, and at most {MOST_NEW_TOKENS:,}",
        ),
        (
            "temperature",
            temperature,
            is_number(temperature) and 0 <= temperature < math.inf,
            "a number, 0 or more; 0 takes the likeliest token",
        ),
        ("top_k", top_k, top_k is None or (_is_whole(top_k) and top_k >= 1), "a whole number, 1 or more"),
        (
            "top_p",
            top_p,
            top_p is None or (is_number(top_p) and 0 < top_p <= 1),
            "a number above 0, and at most 1",
        ),
        ("use_cache", use_cache, isinstance(use_cache, bool), "True or False"),
        (
            "ends",
            ends,
            isinstance(ends, Sequence | Set) and all(map(_is_whole, ends)),
            "a list of token ids",
        ),
    )
    for name, value, is_valid, requirement in checks:
        if not is_valid:
            raise ValueError(f"{names.get(name, name)} is {value!r}; it must be {requirement}")


def _is_whole(value: object) -> bool:
    """Whether the value is an int, of numpy too. False for a bool."""
    return is_number(value) and isinstance(value, Integral)


def check_sizes(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is an int from 1 to MOST_ELEMENTS."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be an int >= 1")
        _check_at_most(config, name, value, MOST_ELEMENTS)


def check_counts(config: Any, *names: str) -> None:
    """Raises ValueError unless each field, a number of layers or heads, is an int from 1 to MOST_LAYERS."""
    check_sizes(config, *names)
    for name in names:
        _check_at_most(config, name, getattr(config, name), MOST_LAYERS)


def check_table(config: Any, *names: str) -> None:
    """Raises ValueError where the product of the fields, a tensor's sizes, is above MOST_ELEMENTS."""
    sizes = [getattr(config, name) for name in names]
    _check_at_most(config, " * ".join(names), math.prod(sizes), MOST_ELEMENTS)


def _check_at_most(config: Any, name: str, value: int, most: int) -> None:
    if value > most:
        shown = f"{value:,}" if value < 10**30 else "a number of many digits"
        raise ValueError(f"{type(config).__name__}: {name} is {shown}; it may be {most:,} at most")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be a number > 0")


def check_probabilities(config: Any, *names: str) -> None:
    """Raises ValueError unless each field is a dropout probability: 0 <= p < 1."""
    for name in names:
        p = getattr(config, name)
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {p!r}; it must be a number in 0 <= {name} < 1")


def check_tensor_parallel(config: SplitSizes, ways: int) -> None:
    """Raises ValueError where tp=`ways` does not divide the heads or hidden sizes, and lists the degrees that work.

    `ways` may be a multiple of the number of key and value heads: each of these heads is then replicated on several
    ranks.
    """
    misfits = _misfits(config, ways)
    if misfits:
        works = [n for n in range(1, config.parallel_sizes["num_heads"] + 1) if not _misfits(config, n)]
        raise ValueError(
            f"tp={ways} does not divide {' and '.join(misfits)}; degrees that work: {', '.join(map(str, works))}"
        )


def _misfits(config: SplitSizes, ways: int) -> list[str]:
    misfits = []
    for name, size in config.parallel_sizes.items():
        if name == "num_kv_heads" and size < config.num_heads:
            if size % ways and ways % size:
                misfits.append(f"{name} {size} (nor is tp a multiple of {size})")
        elif size % ways:
            misfits.append(f"{name} {size}")
    return misfits


def check_head_degrees(heads: Mapping[str, int], *, cp: int, tp: int) -> None:
    """Raises ValueError, with the cp that work, unless tp x cp divides each number of heads. heads: kind -> number."""
    ways = tp * cp
    misfits = [f"{name} {count}" for name, count in heads.items() if count % ways]
    if misfits:
        most = math.gcd(*heads.values())
        works = ", ".join(str(n) for n in divisors(most) if most % (tp * n) == 0) or f"none beside tp={tp}"
        raise ValueError(
            f"context 'ulysses' cuts heads over tp x cp = {tp} x {cp}, which does not divide "
            f"{' and '.join(misfits)}; cp that work: {works}; context 'all_gather' takes any"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def check_kinds(where: str | None, config: object) -> None:
    """Raise ValueError for a field whose value is of another kind than the field's annotation.

    Kinds are ints, numbers, text, flags and names (Literal), also with None and in tuples, for which lists are taken
    too; fields of further kinds are not checked.
    where: the group of options named in the error; None: the config's class.
    Called first in `__post_init__`: the checks of ranges compare numbers.
    """
    own: Any = type(config)
    for name, kinds in _kinds_of(own).items():
        value = getattr(config, name)
        if not any(_is_of(kind, value) for kind in kinds):
            shown = f"{own.__name__}: {name}" if where is None else f"{where}.{name}"
            raise ValueError(f"{shown} is {value!r}; it must be {' or '.join(map(_in_words, kinds))}")


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", NoneType: "None"}


@lru_cache(maxsize=64)
def _kinds_of(config: type) -> dict[str, tuple[Any, ...]]:
    """The kinds of each field of a dataclass whose kinds `check_kinds` knows."""
    own, hints = {each.name for each in fields(config)}, _hints_of(config)
    by_name = {name: _parts_of(hint) for name, hint in hints.items() if name in own}
    return {name: kinds for name, kinds in by_name.items() if all(map(_is_known, kinds))}


def _hints_of(config: type) -> dict[str, Any]:
    """The annotations of the class, or of the nearest base class whose annotations can be evaluated.

    An annotation of a user's class may name a type that is imported for type checkers alone.
    """
    for each in config.__mro__:
        with suppress(NameError, TypeError, AttributeError):
            return get_type_hints(each)
    return {}


def _parts_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: int and None of `int | None`."""
    # typing.Union where an alternative is a Literal, else types.UnionType
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_known(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return all(_is_known(part) for item in get_args(kind) if item is not ... for part in _parts_of(item))
    return kind in _WORDS or get_origin(kind) is Literal


def _is_of(kind: Any, value: object) -> bool:
    if get_origin(kind) is Literal:
        return any(value == name and type(value) is type(name) for name in get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if not isinstance(value, tuple | list) or (items[-1] is not ... and len(items) != len(value)):
            return False
        each = [items[0]] * len(value) if items[-1] is ... else items
        return all(any(_is_of(part, x) for part in _parts_of(item)) for item, x in zip(each, value, strict=True))
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    """What a value of the kind is: "a whole number"."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        items = [item for item in get_args(kind) if item is not ...]
        each = [" or ".join(map(_in_words, _parts_of(item))) for item in items]
        return f"a tuple, each item {each[0]}" if ... in get_args(kind) else f"a tuple of {' and '.join(each)}"
    return _WORDS[kind]


def check_at_least(where: str, config: object, least: int, *names: str) -> None:
    """Raise ValueError unless each named field of `config` is a finite number >= `least`."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value >= least, f"{least} or more")


def check_coefficients(where: str, config: object, *names: str) -> None:
    """Raise ValueError unless each named field of `config` is a finite number >= 0, and no bool."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{where}: {name} is {value!r}; it must be a number, 0 or more")


def check_above_zero(where: str, config: object, *names: str) -> None:
    """Raise ValueError unless each named field of `config` is a finite number > 0."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: value > 0, "above 0")


def check_decay_rates(where: str, config: object, *names: str) -> None:
    """Raise ValueError unless each named field is in [0, 1). At a decay of 1 an average would ignore every gradient."""
    for name in names:
        _check(where, name, getattr(config, name), lambda value: 0 <= value < 1, "0 or more, and below 1")


def check_at_most(where: str, config: object, most: int, *names: str) -> None:
    """Raise ValueError unless each named field is None or in [-most, most]."""
    for name in names:
        value = getattr(config, name)
        if value is not None and abs(value) > most:
            shown = f"{value}" if isinstance(value, float) or abs(value) < 10**20 else "a number of many digits"
            raise ValueError(f"{where}.{name} is {shown}; it must be {most:,} or less")


def _check(where: str, name: str, value: float, fits: Callable[[float], bool], words: str) -> None:
    is_finite = isinstance(value, int) or math.isfinite(value)  # isfinite refuses integers beyond a float
    if not (is_finite and fits(value)):
        raise ValueError(f"{where}.{name} is {value}; it must be {words}")
