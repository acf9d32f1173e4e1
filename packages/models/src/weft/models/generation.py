"""Draws tokens from a model: `generate` returns whole texts, `stream` yields each step's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import uniform
from weft.mesh import Shard, derive_key
from weft.reshard import fixed_parameters, layout_of, to_global
from weft.reshard.extension import wrap

from .checks import check_drawing
from .config import longest_context
from .decoder import CausalModel
from .parallel.parallelize import pipeline_of
from .prompt_cache import PromptCache, depends_on_length
from .safe_files import read_json


class LogitsNotFinite(RuntimeError):
    """The model's logits for a new token are NaN or infinite: no token can be drawn."""


@overload
def generate(
    model: nn.Module,
    prompts: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    ends: Sequence[int] = (),
) -> Tensor: ...
@overload
def generate(
    model: nn.Module,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    ends: Sequence[int] = (),
) -> list[Tensor]: ...
def generate(
    model: nn.Module,
    prompts: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    ends: Sequence[int] = (),
) -> Tensor | list[Tensor]:
    """Extends each prompt by tokens drawn from the model.

    prompts: [B, T] int64, giving [B, T + max_new_tokens]; or a list of [T] of any lengths, giving a list of [T +
        max_new_tokens].
    temperature: 0 takes the most likely token; above 0, logits are divided by the temperature and a token is drawn.
    top_k: draw only among the k most likely tokens; ties with number k are included. None: among all tokens.
    top_p: of these, draw only among the fewest most likely tokens with total probability top_p. None: among all. Both
        filters keep the same tokens as transformers.
    seed: each draw is a function of (seed, row in the batch, number of tokens before), the same on every rank and
        mesh.
    ends: tokens that end a text, as from `end_ids(folder)`. A row is complete at the first end. With [B, T], a complete
        row repeats the end until all rows are complete; with a list, each result stops at the end.
    use_cache: cache keys and values; the model then reads only the new token each time, else the whole context.
        Both give the same tokens, except with dynamic rope scaling beyond max_seq_len: cached keys keep the base of
        their own step, as in transformers.
    A row whose context reaches `Rotary.longest` tokens (max_seq_len without rope scaling) continues with the last
    half.
    Communication: the model's own; for parallel logits also, for each token, a gather of the last position's logits.
    Raises ValueError for an empty prompt, an option out of range, a model in stages, and a model without `make_cache`
    where use_cache is True; LogitsNotFinite where a row's largest logit is NaN or infinite.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    with fixed_parameters(model):
        new_tokens = list(
            stream(model, prompts, max_new_tokens=max_new_tokens, use_cache=use_cache, ends=ends, **options)
        )
    # [B, max_new_tokens], or fewer where all rows are complete.
    new = torch.stack(new_tokens, 1) if new_tokens else None
    if isinstance(prompts, Tensor):
        return prompts.clone() if new is None else torch.cat((prompts, new), 1)
    if new is None:
        return list(prompts)
    return [torch.cat((prompt, _until_end(new[row], ends))) for row, prompt in enumerate(prompts)]


def stream(
    model: nn.Module,
    prompts: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    ends: Sequence[int] = (),
    cache: PromptCache | None = None,
) -> Iterator[Tensor]:
    """Yields the tokens of `generate` step by step: up to max_new_tokens tensors [B].

    A step's tokens are yielded before the next step is computed.
    cache: for a single row, keeps keys and values from call to call. The model then reads only the tokens after the
        longest common beginning with the last call's tokens. None: nothing is kept after the call.
    Further arguments, communication and errors: as for `generate`. Raises ValueError also for a `cache` with several
    rows or without use_cache.
    """
    rows = _as_rows(prompts)
    check_drawing(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        use_cache=use_cache,
        ends=ends,
    )
    draw = _Draw(temperature=temperature, top_k=top_k, top_p=top_p)
    _check(rows)
    if pipeline_of(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} is cut into stages, and each token would wait for every stage in turn; "
            f"save_pretrained(model, folder), and generate with from_pretrained(folder), on one process or a mesh "
            f"without 'pp'"
        )
    if use_cache and not hasattr(model, "make_cache"):
        raise ValueError(f"a {type(model).__name__} has no make_cache(capacity); generate with use_cache=False")
    if cache is not None and (len(rows) > 1 or not use_cache):
        misuse = f"{len(rows)} prompts" if len(rows) > 1 else "use_cache=False"
        raise ValueError(
            f"stream has {misuse} and a PromptCache; give one prompt and use_cache=True, or no PromptCache"
        )
    if depends_on_length(model) and len({len(row) for row in rows}) > 1:
        # Angles depend on the longest row of a call: rows of different lengths are read separately.
        streams = [
            _stream(model, [row], max_new_tokens, draw, seed, use_cache, tuple(ends), n) for n, row in enumerate(rows)
        ]
        return _side_by_side(streams)
    return _stream(model, rows, max_new_tokens, draw, seed, use_cache, tuple(ends), cache=cache)


def _side_by_side(streams: list[Iterator[Tensor]]) -> Iterator[Tensor]:
    """Joins the tokens of several streams of a row each. A finished stream repeats the last token."""
    last: dict[int, Tensor] = {}
    while new := {row: tokens for row, each in enumerate(streams) if (tokens := next(each, None)) is not None}:
        last |= new
        yield torch.cat([last[row] for row in range(len(streams))])


def _stream(
    model: nn.Module,
    rows: list[Tensor],
    max_new_tokens: int,
    draw: _Draw,
    seed: int,
    use_cache: bool,
    ends: tuple[int, ...],
    first_row: int = 0,
    cache: PromptCache | None = None,
) -> Iterator[Tensor]:
    contexts = _Contexts(rows, max_new_tokens, model, use_cache, cache)
    # numbers: [max_new_tokens, B, 1]
    numbers = _uniform_numbers(rows, max_new_tokens, seed, first_row) if draw.temperature else None
    end_tokens = torch.tensor(ends, dtype=torch.int64, device=rows[0].device)
    complete = torch.zeros(len(rows), dtype=torch.bool, device=rows[0].device)
    last = torch.zeros(len(rows), dtype=torch.int64, device=rows[0].device)
    for step in range(max_new_tokens):
        with torch.no_grad():
            logits = contexts.next_logits()  # [B, V]
            _check_logits(logits, step)
            chosen = logits.argmax(-1) if numbers is None else _pick(logits, draw, numbers[step])
            if ends:
                chosen = last = torch.where(complete, last, chosen)
                complete = complete | torch.isin(chosen, end_tokens)
            contexts.append(chosen)
        yield chosen.to(rows[0].dtype)
        if ends and bool(complete.all()):
            return


class _Contexts:
    """The tokens of all rows so far, and the calls of the model. Rows end in the same column, padded on the left."""

    def __init__(
        self,
        rows: list[Tensor],
        max_new_tokens: int,
        model: nn.Module,
        use_cache: bool,
        cache: PromptCache | None,
    ) -> None:
        self.lengths = [len(row) for row in rows]  # of the rows, new tokens included
        self._model: Any = model
        self._limit = longest_context(model.config)
        self._stop = max(self.lengths)  # one past the column of the last token
        self._tokens = rows[0].new_zeros(len(rows), self._stop + max_new_tokens)
        for row, tokens in enumerate(rows):
            self._tokens[row, self._stop - len(tokens) : self._stop] = tokens
        self._use_cache, self._prompt_cache = use_cache, cache
        self._starts: list[int] = []  # the first column of each row's context in the cache
        self._options: dict[str, Any] = {}
        # A model on a mesh returns all logits, and `_last_position` cuts them.
        on_mesh = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._last_only: dict[str, Any] = {"last": True} if isinstance(model, CausalModel) and not on_mesh else {}

    def next_logits(self) -> Tensor:
        """Call the model for the next token: the logits of the last position, [B, V]."""
        starts = [self._stop - length + _context_start(length, self._limit) for length in self.lengths]
        if starts == self._starts and self._use_cache:
            return self._logits(self._stop - 1)
        self._starts = starts
        first = min(starts)
        room = min(self._limit, self._tokens.shape[1] - first)
        self._options = {}
        if max(starts) > first:
            device = self._tokens.device
            first_columns = torch.tensor(starts, device=device).unsqueeze(1)  # [B, 1]
            places = torch.arange(first, first + room, device=device) - first_columns  # [B, room], negative in padding
            self._options = {"positions": places.clamp(min=0), "documents": (places >= 0).long()}
        known = 0  # columns in the cache already
        if self._prompt_cache is not None:
            tokens = self._tokens[0, first : first + room]
            self._options["cache"], known = self._prompt_cache.prepare(
                self._model, tokens, self._stop - first, self._limit
            )
        elif self._use_cache:
            self._options["cache"] = self._model.make_cache(room)
        return self._logits(first + known)

    def _logits(self, column: int) -> Tensor:
        """The logits of the last position, [B, V]. The model reads the columns from `column` on."""
        options = self._options | self._last_only
        if "positions" in options:
            columns = slice(column - min(self._starts), self._stop - min(self._starts))
            options["positions"] = options["positions"][:, columns]
            if not self._use_cache:
                options["documents"] = options["documents"][:, columns]
        return _last_position(self._model(self._tokens[:, column : self._stop], **options))

    def append(self, chosen: Tensor) -> None:
        """Add a token to each row. chosen: [B]."""
        self._tokens[:, self._stop] = chosen
        self._stop += 1
        self.lengths = [length + 1 for length in self.lengths]


def _context_start(length: int, limit: int) -> int:
    """The index of the first token in a row's context.

    Beyond `limit` tokens, half of `limit` is dropped at a time, so the cache is made anew only every limit / 2 steps.
    """
    half = (limit + 1) // 2
    return max(0, -(-(length - limit) // half) * half)


def _last_position(logits: Tensor) -> Tensor:
    """[B, T, V] in any layout -> the last position's logits, replicated: [B, V]."""
    if isinstance(logits, DTensor):
        layout = layout_of(logits)
        if Shard(1) not in layout.placements:  # every rank holds part of the last position: gather only this position
            B, _, V = logits.shape
            logits = wrap(logits.to_local()[:, -1:].contiguous(), layout, (B, 1, V))
        logits = to_global(logits)
    return logits[:, -1]


def _uniform_numbers(rows: list[Tensor], count: int, seed: int, first_row: int) -> Tensor:
    """Uniform numbers for drawing, [count, B, 1] float64: each a function of (seed, row, number of tokens before)."""
    new_tokens = []
    for row, tokens in enumerate(rows, first_row):
        key, before = derive_key(seed, "generate", row), len(tokens)
        new_tokens.append(uniform((before + count,), key, device=tokens.device)[before:].double())
    return torch.stack(new_tokens, 1).unsqueeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """How to draw a token; fields as in `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None


def _pick(logits: Tensor, draw: _Draw, numbers: Tensor) -> Tensor:
    """logits [B, V], numbers [B, 1] -> tokens [B], by inverse transform sampling after top_k and top_p."""
    # cumulative: [B, V]
    cumulative = filter_logits(logits.double() / draw.temperature, draw.top_k, draw.top_p).softmax(-1).cumsum(-1)
    place = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return place.clamp_(max=cumulative.shape[-1] - 1).squeeze(1)


def filter_logits(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Sets logits [B, V] to -inf outside top_k and top_p, like transformers' TopKLogitsWarper and TopPLogitsWarper.

    top_k, top_p: as for `generate`; None leaves all tokens.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -float("inf"))
    if top_p is not None and top_p < 1:
        rising, order = logits.sort(-1)
        unlikely = rising.softmax(-1).cumsum(-1) <= 1 - top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(1, order, unlikely), -float("inf"))
    return logits


def _until_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """[N] -> the tokens up to and including the first end."""
    for place, token in enumerate(tokens.tolist() if ends else ()):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def _check_logits(logits: Tensor, step: int) -> None:
    """Raises LogitsNotFinite where a row's largest logit is NaN or infinite."""
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        raise LogitsNotFinite(
            f"the model's logits for new token {step} of row {int(bad.nonzero()[0])} are NaN or infinite, so no "
            f"token can be drawn; look for NaN in the weights, or load the model in float32"
        )


def end_ids(folder: str | Path, default: Sequence[int] = ()) -> tuple[int, ...]:
    """The end tokens of a folder's model: eos_token_id of generation_config.json, else of config.json, else `default`.

    default: for example the end token of the folder's tokenizer.
    Raises ValueError for a file without JSON, and for an eos_token_id other than a token's id or a list of ids.
    """
    for file in (Path(folder) / name for name in ("generation_config.json", "config.json")):
        if not file.is_file():
            continue
        value = read_json(file, "fetch or save it again").get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
            raise ValueError(f"{file}: eos_token_id is {value!r:.60}; it must be the id of a token, or a list of ids")
        return tuple(ids)
    return tuple(default)


def _as_rows(prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    of_tensors = isinstance(prompts, Sequence) and all(isinstance(each, Tensor) for each in prompts)
    if not (isinstance(prompts, Tensor) or of_tensors):
        raise ValueError("generate takes prompts as a tensor [B, T], or as a list of tensors [T]; give torch.tensor(…)")
    if isinstance(prompts, Tensor) and prompts.ndim != 2:
        raise ValueError(f"generate takes prompts [B, T], or a list of [T], got shape {tuple(prompts.shape)}")
    if not len(prompts):
        raise ValueError("generate was given no prompts; give at least one")
    return list(prompts)


def _check(rows: list[Tensor]) -> None:
    for row, tokens in enumerate(rows):
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"prompts[{row}] has shape {tuple(tokens.shape)}; give a prompt of one token or more: [T]")
