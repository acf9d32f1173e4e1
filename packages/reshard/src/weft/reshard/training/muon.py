"""Muon (Jordan et al. 2024) for plain tensors and DTensors in any layout, beside AdamW for all other parameters.

Muon orthogonalizes each matrix as a whole. The momentum of a sharded matrix moves to a rank with a shard, the matrix's
owner, is orthogonalized there, and returns as shards: an exchange each way, by a plan. The schedule
(planning/matrices.py) has rounds, in which each rank owns at most one matrix. The exchange of the next round starts
before the iterations of this round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from weft.mesh import Layout
from weft.mesh.extension import as_int, is_number

from ..moving.collectives import Pending
from ..moving.dtensor import layout_of, memory_of, shape_of
from ..moving.executor import start_plan
from ..planning.matrices import MatrixShards, Stack, schedule_rounds, shards_of
from ..planning.plan import plan
from ..world.groups import device_mesh, device_type, group_over, this_rank
from .fused_adam import reshard_to_layout_of

# Coefficients of the iteration's polynomial, chosen by Jordan et al. for a steep slope at 0.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOVED = torch.bfloat16  # the iterations compute in this dtype, so moving the momentum in it loses nothing


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for parameter groups with `adamw=True`.

    A matrix's update is the orthogonalized momentum times lr * 0.2 * sqrt(max(n, m)): as large as an update by AdamW at
    the same lr (Liu et al. 2025, "Muon is Scalable for LLM Training"), so all groups share a learning rate. n and m
    are of the matrix; with `rows`, of a block.

    params: matrices [n, m] and stacks of matrices [k, n, m], or groups of parameters. Each matrix of a stack is
        orthogonalized by itself. Every option can be set for a group:
    lr, weight_decay: of Muon and AdamW; the decay is decoupled in both.
    momentum, nesterov, ns_coefficients, eps, ns_steps: of Muon, as in `torch.optim.Muon`.
    rows: splits a matrix [n, m] into blocks of this many rows, for example one for each attention head, and
        orthogonalizes each block by itself; not for stacks. None: the whole matrix.
    adamw: updates the group by AdamW, with `betas` and `adamw_eps`; with `fused`, by torch's fused kernel. fused None:
        torch chooses the kernel.
    State: `momentum_buffer` of a matrix; `step`, `exp_avg` and `exp_avg_sq` under AdamW; in the parameter's layout.

    With equal gradients, weights are equal to the bit on every mesh. A rank that holds a matrix whole computes the
    update by itself: ranks with copies of the matrix all compute the same update.
    Memory of `step`, besides the states: a rank holds six matrices in bfloat16, of three rounds. Of the matrix which
    arrives, the shards sent and the whole matrix; of the matrix at work, the whole matrix twice, and two products of
    the smaller dim squared; of the matrix which leaves, the whole matrix and the shards received. An exchange whose
    parts are not contiguous also packs the parts, less than a matrix each way.
    Communication of `step`: as `update_matrices`; also a reshard of each gradient whose layout is not the parameter's.
    Raises ValueError for options out of range, where a group without `adamw` has parameters besides floating-point
    matrices and stacks, and where `rows` is given for a stack or does not divide n.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        *,
        rows: int | None = None,
        adamw: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        fused: bool | None = True,
    ) -> None:
        own = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps}
        of_adamw = {"adamw": adamw, "betas": betas, "adamw_eps": adamw_eps, "fused": fused}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **own, "eps": eps, "rows": rows, **of_adamw})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters with gradients. The host waits for no device.

        closure: computes the loss again, which `step` then returns. None: gradients are there, and `step` returns None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_matrices()
        for group in self.param_groups:
            if group["adamw"]:
                self._update_by_adamw(group)
        return loss

    @torch.no_grad()
    def update_matrices(self) -> None:
        """Updates the matrices by Muon; called by `step`, on all ranks with shards of a matrix.

        weft.models also calls this without `step`, to record the communication of an update without data.

        Communication: for each `Stack` of a round (matrices of equal shape and layout), two exchanges in bfloat16. In
        the first, each owner receives the missing elements of a matrix; in the second, each rank receives the missing
        elements of its shards.
        Where several axes shard a matrix, the first call also makes the group of the ranks.
        """
        sharded: list[_Matrix] = []
        whole: list[_Matrix] = []
        for matrix in self._matrices():
            (whole if matrix.shards is None else sharded).append(matrix)
        rounds = schedule_rounds(tuple(each.shards for each in sharded if each.shards is not None))
        following = [_Moving(stack, sharded) for stack in rounds[0]] if rounds else []
        for matrix in whole:
            matrix.update(matrix.orthogonalized(matrix.direction()))
        returning: list[_Moving] = []
        for number in range(len(rounds)):
            moving = following
            for stack in moving:
                stack.arrive()
            following = [_Moving(stack, sharded) for stack in rounds[number + 1]] if number + 1 < len(rounds) else []
            for stack in moving:
                stack.orthogonalize()
            for stack in returning:  # before the next exchange back allocates
                stack.update()
            for stack in moving:
                stack.send_back()
            returning = moving
        for stack in returning:
            stack.update()

    def _matrices(self) -> Iterator[_Matrix]:
        """The matrices with gradients of which this rank holds a part, and the momentum of each."""
        for group in self.param_groups:
            for parameter in () if group["adamw"] else group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                gradient = reshard_to_layout_of(parameter, parameter.grad)
                yield from _matrices_of(parameter, gradient, state["momentum_buffer"], group)

    def _update_by_adamw(self, group: dict[str, Any]) -> None:
        """A step of torch's AdamW. Communication: none, where gradients are in their parameter's layout."""
        parameters = [each for each in group["params"] if each.grad is not None]
        states = [self.state[each] for each in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [each.grad for each in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _check_group(group: dict[str, Any]) -> None:
    """Raises ValueError for options out of range, and where the group's parameters do not fit the options."""
    _check_options(group)
    for parameter in () if group["adamw"] else group["params"]:
        shape, rows = tuple(parameter.shape), group["rows"]
        if parameter.ndim not in (2, 3) or not parameter.is_floating_point():
            raise ValueError(
                f"Muon got a parameter of shape {shape} and {parameter.dtype}, and orthogonalizes floating-point "
                f"matrices [n, m] or stacks of them [k, n, m]; put the parameter in a group with adamw=True"
            )
        if rows is not None and (parameter.ndim != 2 or rows < 1 or shape[0] % rows):
            raise ValueError(
                f"Muon got rows={rows} for a parameter of shape {shape}; give a number that divides the rows of a "
                f"matrix [n, m], or None"
            )


def _check_options(group: dict[str, Any]) -> None:
    """Raises ValueError for an option out of range. An lr may be a tensor of one element, as in torch's optimizers."""
    if not isinstance(group["lr"], Tensor) or group["lr"].numel() != 1:
        _check_numbers("lr", (group["lr"],), math.inf, "a finite number, 0 or more")
    for name in ("weight_decay", "eps", "adamw_eps"):
        _check_numbers(name, (group[name],), math.inf, "a finite number, 0 or more")
    _check_numbers("momentum", (group["momentum"],), 1, "a decay rate, 0 or more, and below 1")
    for name, count in (("betas", 2), ("ns_coefficients", 3)):
        values = group[name]
        if not isinstance(values, tuple | list) or len(values) != count:
            raise ValueError(f"Muon: {name} is {values!r}; give {count} numbers")
    _check_numbers("betas", group["betas"], 1, "two decay rates, 0 or more, and below 1")
    if not all(is_number(each) and math.isfinite(each) for each in group["ns_coefficients"]):
        raise ValueError(f"Muon: ns_coefficients is {group['ns_coefficients']!r}; give three finite numbers")
    if not 0 <= as_int("Muon: ns_steps", group["ns_steps"]) < 100:  # as torch.optim.Muon
        raise ValueError(f"Muon: ns_steps is {group['ns_steps']}; give a number of iterations, 0 to 99")
    if group["rows"] is not None:
        as_int("Muon: rows", group["rows"])
    for name in ("nesterov", "adamw", "fused"):
        if not (isinstance(group[name], bool) or (name == "fused" and group[name] is None)):
            raise ValueError(f"Muon: {name} is {group[name]!r}; give True or False")


def _check_numbers(name: str, values: Sequence[Any], below: float, remedy: str) -> None:
    for each in values:
        if not (is_number(each) and 0 <= each < below):
            raise ValueError(f"Muon: {name} is {each!r}; give {remedy}")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in a step: this rank's part of the weight, the gradient and the momentum, each [rows, columns]."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    group: dict[str, Any]
    rows: int  # of a block; all rows for a matrix that is one block
    shards: MatrixShards | None  # None where this rank has the whole matrix

    def direction(self) -> Tensor:
        """Adds the gradient to the momentum. Returns this rank's part of the matrix to orthogonalize, a new tensor."""
        decay = self.group["momentum"]
        self.momentum.lerp_(self.gradient, 1 - decay)
        ahead = self.gradient.lerp(self.momentum, decay) if self.group["nesterov"] else self.momentum
        return ahead.to(MOVED, copy=True)

    def orthogonalized(self, whole: Tensor) -> Tensor:
        """`whole` with each block orthogonalized; overwrites the memory of `whole`. Communication: none."""
        options = self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"]
        blocks = torch.split(whole, self.rows) if 0 < self.rows < whole.shape[0] else [whole]
        done = [_orthogonalized(block, *options) for block in blocks]
        return done[0] if len(done) == 1 else torch.cat(done)

    def update(self, orthogonalized: Tensor) -> None:
        """Decays this rank's part of the weight, and subtracts the step size times `orthogonalized`.

        orthogonalized: this rank's part of the orthogonalized matrix.
        """
        lr = self.group["lr"]
        columns = self.weight.shape[1] if self.shards is None else self.shards.shape[1]
        self.weight.mul_(1 - lr * self.group["weight_decay"])
        # float32 for weights of two bytes: on a CPU, torch rounds the last two-byte elements of a tensor in another way
        change = orthogonalized.float() if self.weight.itemsize == 2 else orthogonalized
        self.weight.add_(change, alpha=-lr * 0.2 * math.sqrt(max(self.rows, columns)))


def _matrices_of(parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> Iterable[_Matrix]:
    """The matrices of a parameter on this rank; none on a rank outside the parameter's mesh."""
    shards, shape, rows = None, shape_of(parameter), group["rows"]
    if isinstance(parameter, DTensor):
        layout = layout_of(parameter)
        if this_rank() not in layout.mesh:
            return
        shards = shards_of(layout, shape, this_rank(), rows)
    locals_ = [_local(each) for each in (parameter, gradient, momentum)]
    if shards is not None:
        rows = shards.rows
    elif rows is None:
        rows = shape[-2]
    for weight, grad, average in zip(
        *(local.unbind(0) if len(shape) == 3 else [local] for local in locals_), strict=True
    ):
        yield _Matrix(weight, grad, average, group, rows, shards)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd. An in-place op on the part changes the tensor, and the tensor's version."""
    return (memory_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


class _Moving:
    """The exchanges of a `Stack` of a round: its matrices move to the owners and back.

    Calls come in this order: construction, `arrive`, `orthogonalize`, `send_back`, `update`.
    """

    def __init__(self, stack: Stack, sharded: Sequence[_Matrix]) -> None:
        """Starts the exchange to the owners. sharded: all sharded matrices; `stack.members` are positions in them."""
        self._stack, self._matrices = stack, [sharded[each] for each in stack.members]
        shards = torch.stack([each.direction() for each in self._matrices])  # [k, rows here, columns here]
        self._pending = self._start(stack.source, stack.target, shards)

    def arrive(self) -> None:
        """Waits for the exchange to the owners."""
        self._whole: Tensor | None = self._pending.wait()  # [1, n, m] on an owner
        del self._pending

    def orthogonalize(self) -> None:
        """Orthogonalizes this rank's own matrix, if any. Communication: none."""
        mesh = self._stack.target.mesh
        if this_rank() in mesh and self._whole is not None:
            matrix = self._matrices[mesh.ranks.index(this_rank())]
            self._whole = matrix.orthogonalized(self._whole[0]).unsqueeze(0)

    def send_back(self) -> None:
        """Starts the exchange back."""
        assert self._whole is not None, "the matrix has arrived"
        self._pending = self._start(self._stack.target, self._stack.source, self._whole)
        self._whole = None

    def update(self) -> None:
        """Waits for the exchange back, and updates this rank's parts of the weights."""
        for matrix, part in zip(self._matrices, self._pending.wait(), strict=True):
            matrix.update(part)
        del self._pending

    def _start(self, src: Layout, dst: Layout, local: Tensor) -> Pending:
        mesh = device_mesh(self._stack.source.mesh, device_type() if local.is_meta else local.device.type)
        if mesh.ndim > 1:
            group_over(mesh, self._stack.source.mesh.axis_names)  # recordings name the group by these axes
        return start_plan(plan(src, dst, self._stack.shape, local.dtype), local, mesh)


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """U V^T, roughly, of a bfloat16 matrix U S V^T; overwrites the matrix's memory.

    A quintic Newton-Schulz iteration by the ops of `torch.optim.Muon`, for the same bits. The result's singular values
    are between 0.5 and 1.5.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    spare = torch.empty_like(x)
    for _ in range(steps):
        gram = x @ x.T
        torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a, out=spare)
        x, spare = spare, x
    return x.T if is_tall else x
