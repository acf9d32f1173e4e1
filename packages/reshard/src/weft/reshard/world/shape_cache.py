"""Ops of torch on the meta device, made faster.

The shapes of results are computed once for each shape of operands: torch finds the shapes of many ops in Python, in
tenths of a millisecond. A training step on shapes calls few ops on operands of few shapes, again and again.
Sums of DTensors with the same layout are taken on the local parts (`add_dtensors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
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


class ShapesMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for runs on shapes. A subclass defines `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps each call of `__torch_dispatch__` for compilers. None compiles a run on shapes."""
        return False


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


def add_dtensors(mode: TorchDispatchMode, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The sum of two DTensors of a shape, dtype and layout, as autograd adds gradients up, from the local parts' sum.

    The result is DTensor's own. DTensor, however, prices all layouts of all operands at an op's first call on a shape
    and a mesh: on three axes for tenths of a second.
    mode: sees the local parts' op. Called inside the mode's `__torch_dispatch__`, with the same arguments.
    Returns NotImplemented for every further op and for every further operand.
    """
    if func not in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) or kwargs or len(args) != 2:
        return NotImplemented
    first, second = args
    if not (isinstance(first, DTensor) and isinstance(second, DTensor)):
        return NotImplemented
    # By torch's protocol for tensors that hold tensors. The first name is the local part's; a form is without the part.
    (local_name, *names), form = first.__tensor_flatten__()  # type: ignore[no-untyped-call]
    _, other_form = second.__tensor_flatten__()  # type: ignore[no-untyped-call]
    is_linear = all(not each.is_partial() or each.is_partial("sum") for each in first.placements)
    if form != other_form or first.device_mesh != second.device_mesh or not is_linear:
        return NotImplemented
    local = mode.__torch_dispatch__(func, (), (getattr(first, local_name), getattr(second, local_name)))  # type: ignore[no-untyped-call]
    if func is torch.ops.aten.add_.Tensor:
        return first
    parts = {local_name: local} | {name: getattr(first, name) for name in names}
    return DTensor.__tensor_unflatten__(parts, form, first.shape, first.stride())  # type: ignore[no-untyped-call]


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
