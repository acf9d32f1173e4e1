"""Tokens drawn from a model, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import uniform
from weft.mesh import Shard, derive_key
from weft.reshard import fixed_parameters, layout_of, to_global
from weft.reshard.running.dtensor import wrap

from .decoder import CausalModel
from .parallel.parallelize import pipeline_of


@overload
def generate(
    model: nn.Module,
    prompts: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Tensor: ...
@overload
def generate(
    model: nn.Module,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> list[Tensor]: ...
def generate(
    model: nn.Module,
    prompts: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Tensor | list[Tensor]:
    """Each prompt, and the tokens that the model puts after it.

    prompts: [B, T] of int64 -> [B, T + max_new_tokens]; or several [T] of any lengths -> as many [T + max_new_tokens].
    temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
    top_k: draw among the k likeliest alone.
    seed: a draw is a function of (seed, the prompt's place in the batch, tokens before it), the same on every rank and mesh.
    use_cache: keep keys and values, so that a new token is all that the model reads; without, it reads the whole context for
        each. The tokens are the same. A row whose context has the model's max_seq_len goes on with the last half of it.
    Communication: the model's own, and for parallel logits a gather of the last position's, each token.
    Raises ValueError for an empty prompt, an option out of range, a model without `make_cache` where it is to be used, and one
    that is cut into stages.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed, "use_cache": use_cache}
    with fixed_parameters(model):
        drawn = list(stream(model, prompts, max_new_tokens=max_new_tokens, **options))
    new = torch.stack(drawn, 1) if drawn else None  # [B, max_new_tokens]
    if isinstance(prompts, Tensor):
        return prompts.clone() if new is None else torch.cat((prompts, new), 1)
    return [prompt if new is None else torch.cat((prompt, new[row])) for row, prompt in enumerate(prompts)]


def stream(
    model: nn.Module,
    prompts: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """The tokens of `generate` as they are drawn: max_new_tokens tensors [B], each yielded before the next is computed.

    Arguments, communication and errors: as of `generate`.
    """
    rows = _rows(prompts)
    _check(rows, max_new_tokens, temperature, top_k)
    if pipeline_of(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} is cut into stages, and each token would wait for all of them in turn; "
            f"save_pretrained(model, folder), and generate with from_pretrained(folder), on one process or a mesh without 'pp'"
        )
    if use_cache and not hasattr(model, "make_cache"):
        raise ValueError(f"a {type(model).__name__} has no make_cache(capacity); generate with use_cache=False")
    return _stream(model, rows, max_new_tokens, temperature, top_k, seed, use_cache)


def _stream(
    model: nn.Module,
    rows: list[Tensor],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    use_cache: bool,
) -> Iterator[Tensor]:
    contexts = _Contexts(rows, max_new_tokens, model, use_cache)
    numbers = _numbers(rows, max_new_tokens, seed) if temperature else None  # [max_new_tokens, B, 1]
    for step in range(max_new_tokens):
        with torch.no_grad():
            logits = contexts.read()  # [B, V]
            if numbers is None:
                chosen = logits.argmax(-1)
            else:
                chosen = _pick(logits, temperature, top_k, numbers[step])
            contexts.append(chosen)
        yield chosen.to(rows[0].dtype)


class _Contexts:
    """What the model reads of each row. Rows end in the same column; the shorter are padded on the left.

    lengths: of the rows, new tokens included.
    """

    def __init__(self, rows: list[Tensor], max_new_tokens: int, model: nn.Module, use_cache: bool) -> None:
        config: Any = model.config
        self.lengths = [len(row) for row in rows]
        self._model: Any = model
        self._limit: int = config.max_seq_len
        self._stop = max(self.lengths)  # the column after the last token
        self._tokens = rows[0].new_zeros(len(rows), self._stop + max_new_tokens)
        for row, tokens in enumerate(rows):
            self._tokens[row, self._stop - len(tokens) : self._stop] = tokens
        self._use_cache = use_cache
        self._starts: list[int] = []  # of each context, its first column, as the cache has it
        self._options: dict[str, Any] = {}
        on_mesh = any(isinstance(parameter, DTensor) for parameter in model.parameters())  # it is cut afterwards there
        self._last: dict[str, Any] = {"last": True} if isinstance(model, CausalModel) and not on_mesh else {}

    def read(self) -> Tensor:
        """The logits of the last position: [B, V]."""
        starts = [self._stop - length + _first(length, self._limit) for length in self.lengths]
        if starts == self._starts and self._use_cache:
            return self._logits(self._stop - 1)
        self._starts = starts
        first = min(starts)
        room = min(self._limit, self._tokens.shape[1] - first)
        self._options = {}
        if max(starts) > first:
            device = self._tokens.device
            begins = torch.tensor(starts, device=device).unsqueeze(1)  # [B, 1]
            places = (
                torch.arange(first, first + room, device=device) - begins
            )  # [B, room], below 0 where there is padding
            self._options = {"positions": places.clamp(min=0), "documents": (places >= 0).long()}
        if self._use_cache:
            self._options["cache"] = self._model.make_cache(room)
        return self._logits(first)

    def _logits(self, column: int) -> Tensor:
        """Of the last position, where the columns from this one on are read."""
        options = self._options | self._last
        if "positions" in options:
            here = slice(column - min(self._starts), self._stop - min(self._starts))
            options["positions"] = options["positions"][:, here]
            if not self._use_cache:
                options["documents"] = options["documents"][:, here]
        return _last(self._model(self._tokens[:, column : self._stop], **options))

    def append(self, chosen: Tensor) -> None:
        """One more token of each row."""
        self._tokens[:, self._stop] = chosen
        self._stop += 1
        self.lengths = [length + 1 for length in self.lengths]


def _first(length: int, limit: int) -> int:
    """Where the context of a row begins: it is dropped half a limit at a time, so that a cache serves for as long."""
    half = (limit + 1) // 2
    return max(0, -(-(length - limit) // half) * half)


def _last(logits: Tensor) -> Tensor:
    """[B, T, V], in any layout -> the last position's, whole: [B, V]."""
    if isinstance(logits, DTensor):
        layout = layout_of(logits)
        if Shard(1) not in layout.placements:  # every rank has its part of the last position: gather no more
            B, _, V = logits.shape
            logits = wrap(logits.to_local()[:, -1:].contiguous(), layout, (B, 1, V))
        logits = to_global(logits)
    return logits[:, -1]


def _numbers(rows: list[Tensor], count: int, seed: int) -> Tensor:
    """Uniform numbers, [count, B, 1] of float64: each a function of (seed, row, tokens before it)."""
    drawn = []
    for row, tokens in enumerate(rows):
        key, before = derive_key(seed, "generate", row), len(tokens)
        drawn.append(uniform((before + count,), key, device=tokens.device)[before:].double())
    return torch.stack(drawn, 1).unsqueeze(-1)


def _pick(logits: Tensor, temperature: float, top_k: int | None, numbers: Tensor) -> Tensor:
    """[B, V] and [B, 1] -> [B]: the first token whose cumulative probability passes its row's number."""
    scaled = logits.double() / temperature
    candidates = None
    if top_k is not None and top_k < scaled.shape[-1]:
        scaled, candidates = scaled.topk(top_k, -1)
    cumulative = scaled.softmax(-1).cumsum(-1)  # [B, V or top_k]
    place = torch.searchsorted(cumulative, numbers, right=True).clamp_(max=cumulative.shape[-1] - 1)
    return (place if candidates is None else candidates.gather(1, place)).squeeze(1)


def _rows(prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(prompts, Tensor) and prompts.ndim != 2:
        raise ValueError(f"generate takes prompts [B, T], or several of [T], got shape {tuple(prompts.shape)}")
    if not len(prompts):
        raise ValueError("generate was given no prompts; give one or more")
    return list(prompts)


def _check(rows: list[Tensor], max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    for row, tokens in enumerate(rows):
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"prompts[{row}] has shape {tuple(tokens.shape)}; give a prompt of one token or more: [T]")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be >= 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be >= 0, and 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be >= 1, or None for all tokens")
