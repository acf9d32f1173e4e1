"""Criteria of preferences for `find_gradients`, and log-probabilities of a batch's documents on every rank.

A step of DPO: make the batch's microbatches, with `PreferenceTargets`; compute the reference's log-probabilities of
the whole batch by `log_probabilities`; give each microbatch the rows' values (`PreferenceTargets.with_reference`);
call `find_gradients` with a `DPOCriterion`. A step of KTO also needs the log-probabilities of the mismatched rows under
both models: `kl_of` makes the criterion's `kl` of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout
from weft.reshard import layout_of
from weft.reshard.extension import this_rank, wait_for, with_fixed_parameters, wrap

from ..losses import IGNORE_INDEX, document_sums
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.step import Microbatch
from ..preference_losses import (
    PairLoss,
    check_judged_options,
    check_pair_options,
    check_positive,
    divides_by_length,
    dpo,
    implicit_rewards,
    kto,
)
from .criterion import partial_loss, sharding_axes
from .loss_parts import LossWithParts

DPO_SUMS = ("chosen_reward", "rejected_reward", "margin", "accuracy")  # `StepResult.sums` under `DPOCriterion`
KTO_SUMS = ("desirable_reward", "undesirable_reward", "kl")  # `StepResult.sums` under `KTOCriterion`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceTargets:
    """The targets of a microbatch under a preference criterion: `Microbatch.targets`.

    `targets` and `numbers` are laid out by `lay_out_batch` (`Batch.targets`, `Batch.numbers`). The further tensors are
    plain, on the model's device, with an entry for each of the microbatch's rows on this rank. D is the most documents
    in a row, E the most examples.
    """

    targets: Tensor  #: [B, T] ints: the tokens to predict, -100 at places without one
    numbers: Tensor  #: [B, T] ints: the number of each token's document in the row, from 0
    rows: Tensor  #: [rows] int64: the number of each row in the whole batch of the step
    #: [rows, E] bool: whether the row has an example e. An example of DPO is a pair of documents: 2 e is chosen and
    #: 2 e + 1 rejected. An example of KTO is the document e.
    valid: Tensor
    #: [rows, D]: log-probabilities of the documents under the reference; None until `with_reference`
    reference: Tensor | None = None
    desirable: Tensor | None = None  #: [rows, E] bool: the judgements of KTO; None for DPO

    def with_reference(self, of_batch: Tensor) -> PreferenceTargets:
        """These targets with this rank's rows of `of_batch` [R, D], the result of `log_probabilities`."""
        return replace(self, reference=of_batch[self.rows])

    def numel(self) -> int:
        """The number of tokens in the whole microbatch, as `Tensor.numel`; read by `RouterLosses`."""
        return self.targets.numel()

    @property
    def shape(self) -> torch.Size:
        """[B, T] of the whole microbatch."""
        return self.targets.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOCriterion:
    """`dpo` as a criterion of `find_gradients`, for a single step and microbatches with `PreferenceTargets`.

    A call takes the model's output, token losses [B, T] of `model(tokens, targets=...)` or logits [B, T, V], and the
    targets. Returns the loss, and as sums `DPO_SUMS`, means over the pairs of the batch: the reward of the chosen
    answer, of the rejected answer, the difference, and the share of pairs with a positive difference.
    Communication: as `document_sums`; twice, if normalized by length.
    Raises ValueError for options refused by `dpo`, and for targets without a reference or of wrong shapes.
    """

    num_documents: int  #: D, the most documents in a row: 2 for each pair
    denominator: float | Tensor  #: the number of pairs in the whole batch of the step
    beta: float = 0.1  #: as for `dpo`
    label_smoothing: float = 0.0  #: as for `dpo`
    loss: PairLoss = "sigmoid"  #: as for `dpo`
    #: divide log-probabilities by the answer's number of learned tokens. Always done with "ipo", as by trl.
    length_normalized: bool = False

    def __post_init__(self) -> None:
        check_pair_options("DPOCriterion", self.beta, self.label_smoothing, self.loss)
        _check_denominator("DPOCriterion", self.denominator)
        if self.num_documents < 2 or self.num_documents % 2:
            raise ValueError(
                f"DPOCriterion: num_documents is {self.num_documents}; give the most documents of a row, 2 for each "
                f"pair"
            )

    @property
    def num_sums(self) -> int:
        """The number of sums that a call returns."""
        return len(DPO_SUMS)

    def __call__(self, output: Tensor, targets: PreferenceTargets) -> LossWithParts:
        sums = log_probabilities_of(output, targets, self.num_documents)
        policy, lengths = _local_rows(sums), None
        if divides_by_length(self.loss, self.length_normalized):
            counts = document_sums(_is_learned(targets.targets), targets.numbers, self.num_documents)
            lengths = _local_rows(counts)
        if _is_outside(sums):
            return LossWithParts(partial_loss(policy, sums))
        _check_rows("DPOCriterion", policy, targets, self.num_documents // 2)
        assert targets.reference is not None, "checked"
        pairs, valid = (*targets.valid.shape, 2), targets.valid
        policy, reference = policy.view(pairs), targets.reference.to(policy.dtype).view(pairs)
        lengths = None if lengths is None else lengths.view(pairs)
        loss = dpo(
            policy,
            reference,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            loss=self.loss,
            lengths=lengths,
            valid=valid,
            denominator=self.denominator,
        )
        with torch.no_grad():
            rewards = implicit_rewards(policy, reference, self.beta, lengths)
            chosen, rejected = torch.where(valid[..., None], rewards, 0).unbind(-1)
            margin = chosen - rejected
            each = (chosen, rejected, margin, (margin > 0).to(margin.dtype))
            addends = torch.stack([values.sum() for values in each]) / self.denominator
        return LossWithParts(partial_loss(loss, sums), addends)


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOCriterion:
    """`kto` as a criterion of `find_gradients`, for a single step and microbatches with `PreferenceTargets`.

    A call takes the model's output, as a call of `DPOCriterion`, for the rows with the examples' own completions.
    Returns the loss, a mean over all examples of the batch, and as sums `KTO_SUMS`: the mean reward of the batch's
    desirable examples, the mean reward of the undesirable examples (0 without any), and `kl`.
    Communication: as `document_sums`.
    Raises ValueError for options refused by `kto`, and for targets without reference or judgements, or of wrong
    shapes.
    """

    num_documents: int  #: D, the most documents in a row
    num_desirable: int  #: desirable examples in the whole batch of the step
    num_undesirable: int  #: undesirable examples in the whole batch of the step
    kl: float | Tensor  #: a scalar: `kl_of` the mismatched rows of the whole batch
    beta: float = 0.1  #: as for `kto`
    desirable_weight: float = 1.0  #: as for `kto`
    undesirable_weight: float = 1.0  #: as for `kto`

    def __post_init__(self) -> None:
        check_judged_options("KTOCriterion", self.beta, self.desirable_weight, self.undesirable_weight)
        if self.num_documents < 1:
            raise ValueError(f"KTOCriterion: num_documents is {self.num_documents}; give the most documents of a row")
        if min(self.num_desirable, self.num_undesirable) < 0 or not self.denominator:
            raise ValueError(
                f"KTOCriterion: the batch has {self.num_desirable} desirable and {self.num_undesirable} undesirable "
                f"examples; give one example at least"
            )

    @property
    def denominator(self) -> int:
        """The number of examples in the whole batch of the step."""
        return self.num_desirable + self.num_undesirable

    @property
    def num_sums(self) -> int:
        """The number of sums that a call returns."""
        return len(KTO_SUMS)

    def __call__(self, output: Tensor, targets: PreferenceTargets) -> LossWithParts:
        sums = log_probabilities_of(output, targets, self.num_documents)
        policy = _local_rows(sums)
        if _is_outside(sums):
            return LossWithParts(partial_loss(policy, sums))
        _check_rows("KTOCriterion", policy, targets, self.num_documents)
        if targets.desirable is None or targets.desirable.shape != targets.valid.shape:
            _refuse_rows("KTOCriterion", "desirable", targets.desirable, targets.valid.shape)
        assert targets.reference is not None, "checked"
        reference, valid = targets.reference.to(policy.dtype), targets.valid
        loss = kto(
            policy,
            reference,
            targets.desirable,
            self.kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            valid=valid,
            denominator=self.denominator,
        )
        with torch.no_grad():
            rewards = implicit_rewards(policy, reference, self.beta)
            desirable = torch.where(valid & targets.desirable, rewards, 0).sum() / max(1, self.num_desirable)
            undesirable = torch.where(valid & ~targets.desirable, rewards, 0).sum() / max(1, self.num_undesirable)
            kl = valid.sum() * (self.kl / self.denominator)  # over all examples, the sum is kl
            addends = torch.stack([desirable, undesirable, kl.to(rewards.dtype)])
        return LossWithParts(partial_loss(loss, sums), addends)


@with_fixed_parameters
def log_probabilities(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    num_documents: int,
    num_rows: int,
    call_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """The log-probability of each document in a batch, [num_rows, num_documents] plain, on every rank of the world.

    Without gradients; for references, and for KTO's mismatched rows. `model` may have its own mesh and plan, as a
    reference beside the trained model. Every rank of the world calls this function, ranks outside the mesh too.
    microbatches: laid out for `model`, with `PreferenceTargets`, of which targets, numbers and rows are read. The
        arguments include `targets=` for token losses, or lack it for logits.
    num_documents: the most documents in a row; entries of missing documents are 0.
    num_rows: of the whole batch; rows in no microbatch are 0.
    The dtype is the model's, widened to at least float32.
    Communication: the model's forward; as `document_sums` for each microbatch; an all-reduce of the result over the
    world.
    """
    pipeline, parameter = pipeline_of(model), next(model.parameters())
    wide = torch.promote_types(parameter.dtype, torch.float32)
    of_batch = torch.zeros(num_rows, num_documents, dtype=wide, device=parameter.device)

    def add(output: Tensor, microbatch: Microbatch) -> Tensor:
        targets: PreferenceTargets = microbatch.targets
        sums = log_probabilities_of(output, targets, num_documents)
        if _is_first_replica(sums, in_stage=pipeline is not None):
            of_batch[targets.rows] = _local_rows(sums).to(wide)
        return sums

    with torch.no_grad(), call_context():
        if pipeline is not None:
            pipeline.evaluate(model, microbatches, add)
        else:
            for each in microbatches:
                add(model(*each.args, **each.kwargs), each)
        if dist.is_initialized() and dist.get_world_size() > 1:
            wait_for(dist.all_reduce(of_batch, async_op=True))
    return of_batch


def log_probabilities_of(output: Tensor, targets: PreferenceTargets, num_documents: int) -> Tensor:
    """The log-probabilities [B, num_documents] of the documents of a microbatch, sharded like the rows.

    output: token losses [B, T] or logits [B, T, V]. Communication: as `document_sums`.
    Raises ValueError for other outputs.
    """
    if not isinstance(targets, PreferenceTargets):
        raise ValueError(
            f"a preference criterion takes PreferenceTargets, got {type(targets).__name__}; make them for each "
            f"microbatch, as Microbatch.targets"
        )
    shape = tuple(targets.shape)
    if not isinstance(output, Tensor) or tuple(output.shape[:2]) != shape or output.ndim > 3:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"a preference criterion takes token losses {shape} or logits {(*shape, 'V')}, got {got}; call the model "
            f"with targets=, as model(tokens, targets=targets)"
        )
    if output.ndim == 3:
        output = cross_entropy(output, targets.targets, reduction="none")
    return -document_sums(output, targets.numbers, num_documents)


def _is_learned(targets: Tensor) -> Tensor:
    """1.0 for each target that is learned, else 0.0; laid out as the targets."""
    if isinstance(targets, DTensor):
        learned = (targets.to_local() != IGNORE_INDEX).float()
        return wrap(learned, layout_of(targets), targets.shape)
    return (targets != IGNORE_INDEX).float()


class _LocalRows(torch.autograd.Function):
    """This rank's rows of a DTensor as a plain tensor. The dual wraps their gradient in the DTensor's layout."""

    @staticmethod
    def forward(ctx: Any, values: DTensor) -> Tensor:
        ctx.layout, ctx.shape = layout_of(values), tuple(values.shape)
        return values.to_local().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return wrap(grad.contiguous(), ctx.layout, ctx.shape)


def _local_rows(values: Tensor) -> Tensor:
    """This rank's rows of values [B, D], sharded by rows alone, as a plain tensor; differentiable."""
    if not isinstance(values, DTensor):
        return values
    local: Tensor = _LocalRows.apply(values)  # type: ignore[no-untyped-call]
    return local


def _is_outside(values: Tensor) -> bool:
    """Whether this rank is outside the mesh of `values`."""
    return isinstance(values, DTensor) and this_rank() not in layout_of(values).mesh


def _is_first_replica(values: Tensor, in_stage: bool) -> bool:
    """Whether this rank is the first of the ranks with the same rows of values [B, D].

    in_stage: whether the values are of a pipeline's last stage. Plain values outside a pipeline are the same on all
        ranks.
    """
    if not isinstance(values, DTensor):
        return in_stage or not dist.is_initialized() or this_rank() == 0
    layout: Layout = layout_of(values)
    coordinate = layout.mesh.coordinate(this_rank())
    if coordinate is None:
        return False
    cut = sharding_axes(layout)
    return all(coordinate[axis] == 0 for axis in layout.mesh.axis_names if axis not in cut)


def _check_denominator(what: str, denominator: float | Tensor) -> None:
    if not isinstance(denominator, Tensor):
        check_positive(what, "denominator", denominator)


def _check_rows(what: str, policy: Tensor, targets: PreferenceTargets, E: int) -> None:
    """Raise ValueError unless reference and valid have this rank's rows. policy: [rows, D]."""
    if targets.reference is None or targets.reference.shape != policy.shape:
        _refuse_rows(what, "reference", targets.reference, policy.shape)
    if targets.valid.shape != (len(policy), E):
        _refuse_rows(what, "valid", targets.valid, (len(policy), E))


def _refuse_rows(what: str, name: str, tensor: Tensor | None, shape: Sequence[int]) -> NoReturn:
    got = "None" if tensor is None else f"of shape {tuple(tensor.shape)}"
    raise ValueError(
        f"{what}: PreferenceTargets.{name} is {got}; give {tuple(shape)}, an entry for each row of this rank"
    )


class ShapedPreferences:
    """A criterion for steps on shapes (`record`), which have targets [B, T] in place of `PreferenceTargets`.

    Communicates as `DPOCriterion` or `KTOCriterion` with as many examples in a row.
    length_normalized: as of `DPOCriterion`; true for the loss "ipo" too.
    """

    def __init__(self, task: Literal["dpo", "kto"], examples_per_row: int, *, length_normalized: bool = False) -> None:
        documents = examples_per_row * (2 if task == "dpo" else 1)
        self._criterion: DPOCriterion | KTOCriterion
        if task == "dpo":
            self._criterion = DPOCriterion(
                num_documents=documents, denominator=1.0, length_normalized=length_normalized
            )
        else:
            self._criterion = KTOCriterion(num_documents=documents, num_desirable=1, num_undesirable=0, kl=0.0)
        self._examples, self._documents = examples_per_row, documents

    @property
    def num_sums(self) -> int:
        """The number of sums that a call returns."""
        return self._criterion.num_sums

    def __call__(self, output: Tensor, targets: Tensor, denominator: float = 1.0) -> LossWithParts:
        local = targets.to_local() if isinstance(targets, DTensor) else targets
        rows = len(local)
        of_examples = local.new_zeros((rows, self._examples), dtype=torch.bool)
        shaped = PreferenceTargets(
            targets=targets,
            numbers=targets,
            rows=torch.arange(rows, device=local.device),
            valid=of_examples,
            desirable=of_examples,
            reference=local.new_zeros((rows, self._documents), dtype=torch.float32),
        )
        return self._criterion(output, shaped)
