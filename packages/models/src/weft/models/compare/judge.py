"""`Judge`: compares two runs step by step, and finds the first tensor whose difference rounding does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .bound import UNIT, Structure, allowed_difference, unit_of
from .record_file import Header, Key, StepDigests, TensorDigest, block_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The difference between two runs in a tensor of a step, or in the loss or norm. Rounding may explain it or not."""

    step: int
    what: str  # the tensor, in words
    name: str  # of the module or parameter; "" for the model; "loss" or "norm of the gradients" for a number
    phase: str  # "start", "forward", "backward", "gradients" or "update"
    # The 2-norm of the difference, over the first run's norm; of a gradient or an update, over `_module_scales`. Of a
    # number: the difference over the first run's number.
    difference: float
    allowed: float  # the largest difference that rounding explains
    # The largest difference of the tensors that the bound starts from. For a weight before the step: of no tensor, 0.
    # For an output, a backward tensor and the loss: of all weights before the step together, and of each output and
    # backward tensor computed earlier in the step. For a gradient: of the weights, and of all outputs and backward
    # tensors. For the norm: of the gradients too. For an update: of the parameter's gradients in all steps compared.
    before: float
    unit: float  # the unit roundoff of the tensor's dtype
    dtype: str
    slices: tuple[tuple[int, int], ...] = ()  # (start, stop) by dim: the block with most of the difference
    share: float = 1.0  # of this block in the squared difference
    ranks: tuple[int, int] | None = None  # a rank of each run with elements of this block; None for a number
    layouts: tuple[str, str] = ("", "")  # of the tensor in each run
    # Of a module's output or backward tensor: Weft's ops called by the module and the modules within. () for the whole
    # model, a parameter or a number.
    ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # lines to print: dtypes, replicas or the runs' options that differ
    exact: str = ""  # `Judge.exact`: if not "", the bits must be the same

    @property
    def ulps(self) -> float:
        """The difference in units in the last place, which are twice the unit roundoff."""
        return self.difference / (2 * self.unit)


@dataclass(slots=True)
class Judge:
    """Compares two runs. The caller adds common steps, in ascending order, until `add` returns a Finding.

    Raises ValueError for runs with different models, data, seeds or batches.
    """

    # Given:
    headers: tuple[Header, Header]
    same_start: bool = False  # whether both runs load the same weights before the first step added
    # The ranks of the largest mesh that a run was on; a resumed run may change its mesh. `__post_init__` raises the
    # number to the ranks of the headers' meshes.
    ranks: int = 1
    # `shared_exact` of the runs: if not "", rounding explains no difference except of Partial values. Cleared where the
    # first step added is not step 1, and begins with weights not known to be the same.
    exact: str = ""
    # Found:
    finding: Finding | None = None  # the first difference unexplained by rounding
    largest: Finding | None = None  # of the explained differences, the largest in proportion to the allowed
    steps: int = 0  # compared
    same: int = 0  # compared steps with the same bits in all tensors
    tensors: int = 0  # compared in the last step
    _structure: Structure = field(init=False)
    _ops: dict[str, tuple[str, ...]] = field(init=False, default_factory=dict)  # of the last step, by module
    _is_first: bool = field(init=False, default=True)  # whether no step is added yet
    # By parameter: the largest relative difference of the gradients so far.
    _noise: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        _check_comparable(*self.headers)
        first, second = self.headers
        self.ranks = max(self.ranks, *(math.prod(each.mesh.values()) for each in self.headers))
        stored = unit_of(first.dtype, second.dtype)
        summed = unit_of(first.dtype, second.dtype, first.reduce_dtype, second.reduce_dtype)
        self._structure = Structure(first, ranks=self.ranks, stored=stored, reduced=summed)

    def add(
        self, a: StepDigests, b: StepDigests, previous: Sequence[StepDigests | None] = (None, None)
    ) -> Finding | None:
        """Compare a step. Returns the Finding of the first tensor unexplained by rounding, or None.

        a, b: a step's digests of the first and the second run.
        previous: each run's digests of the step before, or None.
        Raises ValueError for a tensor of two shapes.
        """
        assert a.step == b.step, "one step of two runs"
        of_a, of_b = a.by_key(), b.by_key()
        pairs = {key: (of_a[key], of_b[key]) for key in of_a if key in of_b}
        if any(x.entry.shape != y.entry.shape for x, y in pairs.values()):
            key = next(key for key, (x, y) in pairs.items() if x.entry.shape != y.entry.shape)
            raise ValueError(
                f"{key} has the shape {of_a[key].entry.shape} in one run and {of_b[key].entry.shape} in the other; "
                f"compare two runs of one model"
            )
        self.steps, self.tensors, self._ops = self.steps + 1, len(pairs), {**b.ops, **a.ops}
        self.same += all(_is_same(x, y) for x, y in pairs.values()) and (a.loss, a.norm) == (b.loss, b.norm)
        weights = _pair(_weights_before(a, previous[0]), _weights_before(b, previous[1]))
        if self._is_first and a.step > 1 and not (weights and all(_is_same(*pair) for pair in weights.values())):
            self.exact = ""  # the steps before are unknown, and may have been taken without `plan.exact`
        for found in self._judge(a, b, pairs, weights):
            if not found.difference <= found.allowed:
                self.finding = replace(found, notes=(*found.notes, *_differing_options(*self.headers)))
                break
            if self.largest is None or _share_explained(found) > _share_explained(self.largest):
                self.largest = found
        self._is_first = False
        return self.finding

    def _judge(
        self,
        a: StepDigests,
        b: StepDigests,
        pairs: Mapping[Key, tuple[TensorDigest, TensorDigest]],
        weights: Mapping[str, tuple[TensorDigest, TensorDigest]],
    ) -> Iterator[Finding]:
        """The Finding of every tensor of a step, explained or not, in the order of computation.

        pairs, weights: the tensors of both runs, and the weights before the step. Weights are judged only where both
        runs begin with the same weights, or must keep the same bits; else their difference is taken as given.
        """
        if self.exact or (self._is_first and (a.step == 1 or self.same_start)):
            for name, pair in weights.items():
                yield self._found(a.step, Key("before", name), pair, before=0.0)
        before = _relative_of_all(weights)
        for kind, number in (("output", "loss"), ("backward", None)):
            for key, pair in pairs.items():
                if key.kind == kind:
                    found = self._found(a.step, key, pair, before=before)
                    yield found
                    before = max(before, found.difference)
            if number is not None:
                yield self._number(a.step, "the loss", "forward", a.loss, b.loss, before)
        gradients = {key: pair for key, pair in pairs.items() if key.kind == "gradient"}
        scales = _scales({key.name: pair[0] for key, pair in gradients.items()})
        of_gradients = before
        for key, pair in gradients.items():
            found = self._found(a.step, key, pair, before=before, scale=scales[key.name])
            yield found
            of_gradients = max(of_gradients, found.difference)
            noise = _distance(*pair) / (pair[0].norm or 1.0)
            self._noise[key.name] = max(self._noise.get(key.name, 0.0), noise)
        if a.norm is not None and b.norm is not None:
            yield self._number(a.step, "the norm of the gradients", "gradients", a.norm, b.norm, of_gradients)
        yield from self._updates(a.step, pairs, weights)

    def _updates(
        self,
        step: int,
        pairs: Mapping[Key, tuple[TensorDigest, TensorDigest]],
        weights: Mapping[str, tuple[TensorDigest, TensorDigest]],
    ) -> Iterator[Finding]:
        """The Finding of each parameter's update: the weight after the step minus the weight before."""
        changes = {}
        for key, (x, y) in pairs.items():
            if key.kind == "weight" and key.name in weights:
                changes[key] = x.sketches - weights[key.name][0].sketches, y.sketches - weights[key.name][1].sketches
        norms = {key.name: _norm_of(change) for key, (change, _) in changes.items()}
        sizes = {key.name: math.prod(pairs[key][0].entry.shape) for key in changes}
        scales = _module_scales(norms, sizes)
        for key, (of_a, of_b) in changes.items():
            pair, scale = pairs[key], scales[key.name]
            stored = unit_of(pair[0].entry.dtype) * pair[0].norm  # weights are rounded when stored
            allowed = allowed_difference(self._structure.own(key), self._noise.get(key.name, 0.0), is_update=True)
            allowed += allowed_difference(stored, 0.0) / scale if scale else math.inf
            same = _is_same(*pair) and _is_same(*weights[key.name])
            difference = 0.0 if same or not scale else _norm_of(of_a - of_b) / scale
            what = f"the update of {key.name}"
            yield self._finding(step, key, pair, of_a - of_b, what, difference, allowed, self._noise.get(key.name, 0.0))

    def _found(
        self, step: int, key: Key, pair: tuple[TensorDigest, TensorDigest], *, before: float, scale: float = 0.0
    ) -> Finding:
        """The Finding of a tensor, with the bound of bound.py.

        before: see `Finding.before`.
        scale: what the difference is divided by, if larger than the tensor's norm: see `_scales`.
        """
        size = max(pair[0].norm, scale)
        distance = _distance(*pair)
        difference = 0.0 if distance == 0 else distance / size if size else math.inf
        own = self._structure.own(key)
        allowed = allowed_difference(own, before, chooses=self._structure.chooses(key))
        return self._finding(
            step, key, pair, pair[0].sketches - pair[1].sketches, str(key), difference, allowed, before
        )

    def _finding(
        self,
        step: int,
        key: Key,
        pair: tuple[TensorDigest, TensorDigest],
        sketches: Any,
        what: str,
        difference: float,
        allowed: float,
        before: float,
    ) -> Finding:
        """A Finding with block, ranks and notes.

        sketches: of the difference of the runs' tensors or updates, [blocks, SKETCHES]; see digest.py.
        what: the tensor, in words. difference, allowed, before: as in the Finding.
        """
        entry, other = pair[0].entry, pair[1].entry
        squares = np.square(sketches).mean(1)
        block = int(np.argmax(squares)) if np.isfinite(squares).all() else int(np.argmax(~np.isfinite(squares)))
        notes = []
        if entry.dtype != other.dtype:
            notes.append(f"{entry.dtype} in the first run, {other.dtype} in the second")
        for digest, run in zip(pair, ("first", "second"), strict=True):
            if not digest.agrees:
                notes.append(f"its replicas differ between ranks of the {run} run")
        total = float(squares.sum())
        # Not for Partial values, which have no hash: the ranks' addends differ between meshes.
        exact = self.exact if entry.is_hashed and other.is_hashed else ""
        phases = {"before": "start", "output": "forward", "backward": "backward", "gradient": "gradients"}
        return Finding(
            step=step,
            what=what,
            name=key.name,
            phase=phases.get(key.kind, "update"),
            difference=difference,
            allowed=0.0 if exact else allowed,
            before=before,
            unit=unit_of(entry.dtype),
            dtype=entry.dtype,
            exact=exact,
            slices=tuple((each.start, each.stop) for each in block_slices(entry.shape)[block]),
            share=float(squares[block]) / total if total > 0 else 1.0,
            ranks=(entry.holders[block], other.holders[block]),
            layouts=(entry.layout, other.layout),
            ops=self._ops_of(key),
            notes=tuple(notes),
        )

    def _ops_of(self, key: Key) -> tuple[str, ...]:
        """The ops called by a module and the modules within; () for parameters and for the whole model."""
        if key.kind not in ("output", "backward") or not key.name:
            return ()
        within = (name for name in self._ops if name == key.name or name.startswith(f"{key.name}."))
        return tuple(dict.fromkeys(op for name in within for op in self._ops[name]))

    def _number(self, step: int, what: str, phase: str, a: float, b: float, before: float) -> Finding:
        """The Finding of a number, the loss or the norm: `a` and `b` in the two runs. what: the number, in words."""
        difference = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / abs(a) if a else math.inf
        return Finding(
            step=step,
            what=f"{what}, {a:.9g} and {b:.9g}",
            name=what.removeprefix("the "),
            phase=phase,
            difference=difference,
            allowed=0.0 if self.exact else allowed_difference(self._structure.own_of_sum(), before),
            before=before,
            unit=UNIT["float32"],
            dtype="float32",
            exact=self.exact,
        )


def shared_exact(headers: Iterable[Header]) -> str:
    """The mesh named by `plan.exact`, as "dp=4,tp=2", if steps under these headers must have the same bits; else "".

    The bits must be the same where all runs have a plan with `exact`, and equal facts in `Header.arithmetic`. Each run
    then sums in the order of the named mesh, whatever mesh the run is on.
    """
    first, *further = (each.arithmetic for each in headers)
    return first["exact"] if first is not None and all(each == first for each in further) else ""


def _check_comparable(a: Header, b: Header) -> None:
    """Raise ValueError unless two runs train the same model, from the same seed, on the same batches."""
    if a.parameters != b.parameters:
        names = [name for name in {**a.parameters, **b.parameters} if a.parameters.get(name) != b.parameters.get(name)]
        shapes = [f"{each.parameters[names[0]]}" if names[0] in each.parameters else "missing" for each in (a, b)]
        raise ValueError(f"the runs train two models: {names[0]} is {shapes[0]} in one and {shapes[1]} in the other")
    for name, what in (("batch", "batches of other sizes"), ("data", "other data"), ("seed", "other seeds")):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"the runs have {what}: {getattr(a, name)!s:.80} and {getattr(b, name)!s:.80}")
    if a.microbatches != b.microbatches and a.by_microbatch:
        raise ValueError(
            f"the runs divide a batch into {a.microbatches} and {b.microbatches} microbatches, of which each has "
            f"{' and '.join(a.by_microbatch)} of its own; compare runs with the same --plan.microbatches"
        )


def _differing_options(a: Header, b: Header) -> list[str]:
    """A line about the options that differ between two runs; none where all are equal, or where a file has none."""
    if not (a.options and b.options):
        return []
    names = [name for name in {**a.options, **b.options} if a.options.get(name) != b.options.get(name)]
    shown = [f"{name} is {a.options.get(name)!s:.60} and {b.options.get(name)!s:.60}" for name in names]
    return [f"options of the two runs differ: {'; '.join(shown)}"] if shown else []


def _share_explained(found: Finding) -> float:
    """An explained difference over the largest that rounding explains."""
    return found.difference / found.allowed if found.allowed else 0.0


def _weights_before(step: StepDigests, previous: StepDigests | None) -> dict[str, TensorDigest]:
    """The digests of the weights at the start of a step: recorded in this step, or after the step before."""
    found = {key.name: each for key, each in step.by_key().items() if key.kind == "before"}
    if found or previous is None or previous.step != step.step - 1:
        return found
    return {key.name: each for key, each in previous.by_key().items() if key.kind == "weight"}


def _pair(a: Mapping[str, TensorDigest], b: Mapping[str, TensorDigest]) -> dict[str, tuple[TensorDigest, TensorDigest]]:
    """The digests of both runs, for names of both."""
    return {name: (a[name], b[name]) for name in a if name in b}


def _is_same(x: TensorDigest, y: TensorDigest) -> bool:
    """Whether two tensors have the same bits in all replicas; of Partial values, the same sums."""
    if not (x.entry.is_hashed and y.entry.is_hashed):
        return bool(np.allclose(x.sketches, y.sketches, rtol=1e-13, atol=0))
    return x.agrees and y.agrees and x.entry.dtype == y.entry.dtype and bool(np.array_equal(x.hashes, y.hashes))


def _distance(x: TensorDigest, y: TensorDigest) -> float:
    """The 2-norm of the difference of two tensors, estimated."""
    return 0.0 if _is_same(x, y) else _norm_of(x.sketches - y.sketches)


def _norm_of(sketches: Any) -> float:
    """The 2-norm of a tensor, estimated from its sketches [blocks, SKETCHES]; infinite unless all values are finite."""
    squares = float(np.square(sketches).mean(1).sum())
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def _relative_of_all(weights: Mapping[str, tuple[TensorDigest, TensorDigest]]) -> float:
    """The relative difference of all weights together."""
    distance = math.sqrt(math.fsum(_distance(*pair) ** 2 for pair in weights.values()))
    size = math.sqrt(math.fsum(x.norm**2 for x, _ in weights.values()))
    return distance / size if size else 0.0


def _scales(digests: Mapping[str, TensorDigest]) -> dict[str, float]:
    """By parameter, what the difference of its gradients is divided by: see `_module_scales`."""
    norms = {name: each.norm for name, each in digests.items()}
    return _module_scales(norms, {name: math.prod(each.entry.shape) for name, each in digests.items()})


def _module_scales(norms: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    """By parameter, the larger of two norms: the norm of the parameter's tensor, and the norm of as many elements that
    each equal the root mean square of the module's elements.

    norms, sizes: by parameter, the norm and the number of elements of a tensor, such as the gradient. A module's
    elements are those of the tensors of all its parameters.
    Terms of a gradient may cancel, as for the bias of keys: softmax ignores a number added to all scores. The gradient
    is then rounding alone, and a difference must be compared with the size of the terms, which shows in the module's
    further gradients.
    """
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norm**2
        counts[module] = counts.get(module, 0) + sizes[name]
    return {
        name: max(norm, math.sqrt(squares[module] / max(1, counts[module]) * sizes[name]))
        for name, norm in norms.items()
        for module in (name.rpartition(".")[0],)
    }
