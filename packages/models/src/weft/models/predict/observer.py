"""`Observer`: lists the events of a step that runs on shapes, each with its place in the step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter
from weft.kernels.extension import Op, OpPart
from weft.reshard.extension import Call, ShapesMode, add_dtensors

from ..losses import local_value
from ..step.alike import Representative
from ..step.communication import Phase
from .events import Compute, ComputePart, Event, OpKind, Place, Purpose, Start, Wait
from .work import attention_sizes, bytes_of, count_experts, is_attention, is_view, product_sizes, tensors_in

ModelPart = tuple[Representative | None, Place]  # (block, "block"), (None, "before") or (None, "after") all blocks


@dataclass(frozen=True, slots=True)
class Placed:
    """An event with its place in the step. Fields as of `Segment`."""

    event: Event
    phase: Phase
    microbatch: int  # -1 in the phases "gradients" and "optimizer"
    block: Representative | None  # the block at work; None outside blocks
    place: Place


class Observer(ShapesMode):
    """Lists the events of a step on shapes in `placed`. Made by `trace_step` and by `op_cases.Case`.

    Collectives come by `on_call`, Weft's ops by `on_op`. As a dispatch mode, the observer sees the ops of torch.
    prefix: name of the model's nn.ModuleList of blocks. representatives: the blocks in this list.
    microbatches: how many the step runs.
    """

    def __init__(
        self, model: nn.Module, prefix: str, representatives: Sequence[Representative], microbatches: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placed: list[Placed] = []
        self.phase: Phase = "forward"
        self.microbatch = 0
        self.message_bytes = 0  # the most bytes returned by a block
        self._model, self._microbatches = model, microbatches
        self._num_experts = count_experts(model)
        self._blocks = {f"{prefix}.{i}": each for i, each in enumerate(representatives)}
        self._block: Representative | None = None
        self._place: Place = "before"
        self._modules: list[str] = [""]  # the modules whose forward runs, outermost first
        self._callers: dict[str, list[str]] = {}  # op -> modules of its forward calls whose backward is still to come
        self._num_collectives = 0
        self._op: _OpWork | None = None  # of the Weft op at work

    # -- where in the step

    def after_phase(self, phase: Phase) -> None:
        """Go on to the phase and the microbatch that follow `phase`. Passed to `PreparedStep.run`."""
        if self.phase == "gradients":
            return  # a second call with "backward" follows the last microbatch
        if phase == "forward":
            self.phase, self._place, self._block = "backward", "after", None
        elif self.microbatch + 1 < self._microbatches:
            self.phase, self._place, self._block = "forward", "before", None
            self.microbatch += 1
        else:
            self.phase, self.microbatch, self._place, self._block = "gradients", -1, "after", None
            self._modules = [""]

    @contextmanager
    def modules_followed(self) -> Iterator[None]:
        """A context in which the observer knows the module whose forward runs.

        The hooks are global: a module with hooks of its own would run without fused ops.
        """
        names = {module: name for name, module in self._model.named_modules()}

        def enter(module: nn.Module, arguments: Any) -> None:
            if module in names:
                self._enter(names[module])

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if module in names:
                self._leave(names[module], output)

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self._modules.append(name)
        self._locate(name)

    def _leave(self, name: str, output: Any) -> None:
        if name in self._modules[1:]:
            del self._modules[len(self._modules) - 1 - self._modules[::-1].index(name) :]
        if name in self._blocks:
            tensors = [each for each in tree_iter(output) if isinstance(each, Tensor)]
            self.message_bytes = max(self.message_bytes, sum(bytes_of(local_value(each)) for each in tensors))

    def _locate(self, module: str) -> None:
        """Set the present block and place from the name of the running module."""
        if self.phase not in ("forward", "backward") or not module:
            return
        name = next((each for each in self._blocks if module == each or module.startswith(f"{each}.")), None)
        if name is not None:
            self._block, self._place = self._blocks[name], "block"
        elif self._block is not None:
            self._block, self._place = None, "after" if self.phase == "forward" else "before"

    def _add(self, event: Event) -> None:
        self.placed.append(Placed(event, self.phase, self.microbatch, self._block, self._place))

    # -- collectives

    def on_call(self, call: Call) -> Callable[[], None]:
        """Add the start of a collective; the function returned adds the wait. Set as `Recorded.listener`."""
        if call.collective is None:  # the bytes count in the call before
            return _proceed
        number, ranks = self._num_collectives, sorted(call.ranks)  # a group over "cp" and "dp" lists "dp" first
        self._num_collectives += 1
        self._add(
            Start(
                number=number,
                kind=call.collective.kind,
                axes=call.collective.axes,
                group=call.group,
                size=len(ranks),
                stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
                nbytes=call.collective.nbytes,
                purpose=_purpose(),
                module=self._modules[-1],
            )
        )
        return lambda: self._add(Wait(number=number))

    # -- work of the device

    def on_op(self, op: Op, part: OpPart, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Run a Weft op's function, and add the work as a single event. Passed to `observing`."""
        if self._op is not None:  # an op within an op
            return function(*arguments, **options)
        module = self._modules[-1]
        if part in ("backward", "epilogue_backward", "recompute"):
            callers = self._callers.get(op.name, [])
            # Backward runs in the opposite order. The last of the op's functions to run is `backward`.
            module = (callers.pop() if part == "backward" else callers[-1]) if callers else module
            # A block recomputed in backward stops early: calls of modules may not have ended.
            self._modules = ["", module]
            self._locate(module)
        else:
            self._callers.setdefault(op.name, []).append(module)
        self._op = inside = _OpWork()
        try:
            result = function(*arguments, **options)
        finally:
            self._op = None
        if not inside.num_launches:
            return result
        tensors = tensors_in((arguments, options))
        moved = [*inside.read.values(), *tensors_in(result)]
        kind: OpKind = "memory"
        sizes: tuple[tuple[int, ...], ...] = tuple(inside.products)
        flops = sum(2 * math.prod(each) for each in inside.products)
        if is_attention(op.name):
            kind = "attention"
            size, pairs = attention_sizes(arguments[0] if part == "backward" else arguments, options)
            moved += tensors  # on shapes, attention computes nothing
            sizes, flops = (size,), (10 if part == "backward" else 4) * pairs * size[1] * size[-1]
        elif sizes:
            kind = "product"
        self._add(
            Compute(
                name=op.name,
                part=self._part_of(part),
                kind=kind,
                dtype=_dtype_name(tensors),
                nbytes=sum(bytes_of(each) for each in _distinct(moved)),
                flops=flops,
                sizes=sizes,
                num_launches=inside.num_launches,
                module=module,
            )
        )
        return result

    def _part_of(self, part: OpPart) -> ComputePart:
        """`Compute.part` of an op's function that runs in the present phase."""
        if part == "recompute":
            return "recompute"
        if part in ("forward", "inference"):
            return "repeat" if self.phase == "backward" else "forward"
        return "backward"

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return add_dtensors(self, func, args, kwargs)
        output = func(*args, **(kwargs or {}))
        if any(issubclass(each, FakeTensor) for each in types):
            return output  # a DTensor's op runs so once in a process, for the result's shape
        if func.namespace not in ("aten", "prims", "weft") or is_view(func, args, output):
            return output
        products = product_sizes(func, args, self._num_experts)
        read = [] if func.__name__.startswith(("zeros", "ones", "fill", "full")) else tensors_in((args, kwargs))
        if self._op is not None:
            self._op.add(products, read, tensors_in(output))
            return output
        tensors = _distinct([*read, *tensors_in(output)])
        self._add(
            Compute(
                name=f"aten.{func.__name__.partition('.')[0]}",
                part="forward" if self.phase == "forward" else "backward",
                kind="product" if products else "memory",
                dtype=_dtype_name(tensors),
                nbytes=sum(bytes_of(each) for each in tensors),
                flops=sum(2 * math.prod(each) for each in products),
                sizes=tuple(products),
                module=self._modules[-1],
            )
        )
        return output

    def add_update(self, model: nn.Module, states: Mapping[str, int] | int) -> dict[ModelPart, int]:
        """Add the optimizer's elementwise update: an event for the parameters before, in each block, and after.

        An update reads gradient, parameter and states, and writes parameter and states.
        states: tensors of optimizer state for each trained parameter, or a mapping from the parameter's name.
        Returns the bytes of this rank's trained parameters in each part; for a block, of this block alone.
        """
        self.phase, self.microbatch, self._block, self._place = "optimizer", -1, None, "before"
        updates: dict[ModelPart, list[tuple[int, str]]] = {}
        held: dict[ModelPart, int] = {}
        part: ModelPart = (None, "before")
        for name, parameter in model.named_parameters():
            prefix = next((each for each in self._blocks if name.startswith(f"{each}.")), None)
            if prefix is not None:
                block = self._blocks[prefix]
                part = block, "block"
                name = f"{prefix.rpartition('.')[0]}.{block.number}{name.removeprefix(prefix)}"
            elif part[0] is not None:
                part = None, "after"
            if parameter.requires_grad:
                local = local_value(parameter)
                count = states if isinstance(states, int) else states[name]
                held[part] = held.get(part, 0) + bytes_of(local)
                updates.setdefault(part, []).append((bytes_of(local) * (3 + 2 * count), _dtype_name([local])))
        for (self._block, self._place), of_part in updates.items():
            self._add(
                Compute(
                    name="optimizer",
                    part="forward",
                    kind="optimizer",
                    dtype=of_part[0][1],
                    nbytes=sum(nbytes for nbytes, _ in of_part),
                    num_launches=len(of_part),
                )
            )
        return held


def _proceed() -> None:
    """The wait for a call without an event."""


def _purpose() -> Purpose:
    """What the present collective is for, by the innermost file of `_PURPOSES` on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename.rpartition("/")[2]
        if name in _PURPOSES:
            return _PURPOSES[name]
        if name in ("reshard.py", "transport.py", "find_gradients.py"):
            return ""  # "transport.py" moves tokens of experts, within a module whose parameters are gathered
        frame = frame.f_back  # type: ignore[assignment]
    return ""


_PURPOSES: dict[str, Purpose] = {
    "gradient_buckets.py": "gradients",
    "gathering.py": "parameters",
    "unit.py": "parameters",
    "full_parameters.py": "parameters",
}


class _OpWork:
    """The work of torch's ops inside a call of a Weft op: launches, products, and tensors read from outside the call.

    A kernel reads tensors from outside and writes the results. Values in between are assumed to stay on the chip.
    """

    __slots__ = ("_between", "_written", "num_launches", "products", "read")

    def __init__(self) -> None:
        self.num_launches = 0
        self.products: list[tuple[int, int, int, int]] = []
        self.read: dict[tuple[Any, ...], Tensor] = {}
        self._written: set[int] = set()  # addresses of the storages of values in between
        self._between: list[Tensor] = []  # values in between: no later storage gets the address of a freed one

    def add(
        self, products: Sequence[tuple[int, int, int, int]], read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        self.num_launches += 1
        self.products += products
        for each in read:
            storage = each.untyped_storage()._cdata
            if storage not in self._written:
                self.read[storage, each.storage_offset(), tuple(each.shape)] = each
        self._between += written
        from_outside = {key[0] for key in self.read}
        self._written |= {each.untyped_storage()._cdata for each in written} - from_outside


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The local tensors, of equal views of a storage the last alone."""
    found = {
        (each.untyped_storage()._cdata, each.storage_offset(), tuple(each.shape)): each
        for each in (local_value(tensor) for tensor in tensors)
    }
    return list(found.values())


def _dtype_name(tensors: Sequence[Tensor]) -> str:
    floating = (each.dtype for each in tensors if each.is_floating_point())
    return str(next(floating, torch.int64)).removeprefix("torch.")
