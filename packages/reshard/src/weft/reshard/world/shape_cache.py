"""Ops of torch on the meta device, made faster: the shapes of results are computed once for each shape of operands.

torch finds the shapes of many ops in Python, in tenths of a millisecond. A training step on shapes calls few ops on
operands of few shapes, again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

# How the names of ops begin that are never looked up: results depend on more than operands' shapes and options, or an
# operand's memory is changed.
_EXCLUDED = ("resize", "set_", "_local_scalar_dense", "item", "nonzero", "rand", "normal", "bernoulli", "dropout")
_OPTIONS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOST = 100_000  # results; with more, the table begins anew
_UNKNOWN: Any = object()  # in place of a key: no result is looked up for these operands

# The result of an op: a new tensor, a tuple or list of new tensors, the first operand with new values ("first"), or
# anything else. Results of the last kind are not looked up.
_Kind = Literal["tensor", "tuple", "list", "first", "else"]
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides, dtype
_kinds: dict[Any, _Kind] = {}
_results: dict[Any, Sequence[_Form]] = {}  # by op and operands; () for an op of the kind "first"


def call_on_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, from inside `__torch_dispatch__`.

    func: an op of torch. Where the op only makes tensors on the meta device, or only changes the first operand's
    values, the op runs once for each set of sizes, strides, dtypes and options; later calls make empty results of the
    same shapes. Every different op runs each time. All ops run inside a further dispatch mode, which may count calls.
    """
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _kind_of(func)
    if kind == "else" or torch._C._len_torch_dispatch_stack():  # another mode is to see the op
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        operands = _key((args, kwargs))
        if operands is _UNKNOWN:
            return func(*args, **kwargs)
        key = func, operands
        forms = _results.get(key)
        if forms is None:
            result = func(*args, **kwargs)
            found = () if kind == "first" else _forms_of(result, args)
            if found is not None:
                if len(_results) >= _MOST:
                    _results.clear()
                _results[key] = found
            return result
        if kind == "first":
            return args[0]
        tensors = [torch.empty_strided(sizes, strides, dtype=dtype, device="meta") for sizes, strides, dtype in forms]
        return tensors[0] if kind == "tensor" else tensors if kind == "list" else tuple(tensors)


def _kind_of(func: Any) -> _Kind:
    if func.namespace != "aten" or func.__name__.startswith(_EXCLUDED) or torch.Tag.inplace_view in func.tags:
        return "else"
    schema = func._schema
    returned = [str(each.type) for each in schema.returns]
    if schema.is_mutable:
        changed = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        is_first = changed == [schema.arguments[0].name] and schema.name.endswith("_") and returned == ["Tensor"]
        return "first" if is_first else "else"
    if any(each.alias_info is not None for each in schema.returns):
        return "else"
    if returned == ["Tensor"]:
        return "tensor"
    if returned == ["Tensor[]"]:
        return "list"
    return "tuple" if returned and set(returned) == {"Tensor"} else "else"


def _forms_of(result: Any, args: tuple[Any, ...]) -> list[_Form] | None:
    """The forms of an op's results; None unless all are plain tensors on the meta device in new memory.

    args: the op's arguments. A result may be a view of an argument against the op's schema (`_unsafe_view`).
    """
    memory = {each.untyped_storage()._cdata for each in tree_iter(args) if isinstance(each, Tensor)}
    tensors = [result] if isinstance(result, Tensor) else result
    found = []
    for each in tensors:
        # An op leaves out results, as gradients of no use to the caller.
        if not isinstance(each, Tensor) or each.untyped_storage()._cdata in memory:
            return None
        if type(each) is not Tensor or not each.is_meta or each.storage_offset() or each.dtype.is_complex:
            return None
        found.append((tuple(each.shape), each.stride(), each.dtype))
    return found


def _key(value: Any) -> Any:
    """A hashable key: equal for operands and options for which an op's results have the same forms.

    `_UNKNOWN` for a value whose effect on the forms is not known, as a tensor with data.
    """
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        return (value.shape, value.stride(), value.dtype) if value.is_meta and not value.is_complex() else _UNKNOWN
    if kind in _OPTIONS:
        return kind, value
    if kind is dict:
        value = tuple(value.items())
    elif kind is not tuple and kind is not list:
        return _UNKNOWN
    parts = []
    for each in value:
        part = _key(each)
        if part is _UNKNOWN:
            return _UNKNOWN
        parts.append(part)
    return tuple(parts)
