"""Tokens drawn from a model, one after another."""

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
from weft.reshard.running.dtensor import wrap

from .checks import MOST_NEW_TOKENS
from .decoder import CausalModel
from .documents import read_json
from .parallel.parallelize import pipeline_of


class LogitsNotFinite(RuntimeError):
    """A model gave no logits to draw a token by: NaN, or infinite."""


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
    """Each prompt, and the tokens that the model puts after it.

    prompts: [B, T] of int64 -> [B, T + max_new_tokens]; or several [T] of any lengths -> as many [T + max_new_tokens].
    temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
    top_k: draw among the k likeliest tokens alone; tokens as likely as number k are kept too.
    top_p: of these, draw among the fewest likeliest tokens with a probability of top_p in sum. Kept tokens are those of transformers.
    ends: tokens that end a text, such as `end_ids(folder)`. A row is complete with its first end: in [B, T] the row repeats
        the end until all rows are complete; of several [T], each result stops with its end.
    seed: a draw is a function of (seed, the prompt's place in the batch, tokens before it), the same on every rank and mesh.
    use_cache: keep keys and values, so that a new token is all that the model reads; without, it reads the whole context for
        each. The tokens are the same, except with dynamic rope scaling beyond max_seq_len: cached keys keep the base they were
        read with, as in transformers. A row with a context of `Rotary.longest` tokens, max_seq_len without rope scaling, goes on
        with the last half of the context.
    Communication: the model's own, and for parallel logits a gather of the last position's, each token.
    Raises ValueError for an empty prompt, an option out of range, a model without `make_cache` where it is to be used, and one
    that is cut into stages; LogitsNotFinite where a row's largest logit is NaN or infinite.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    with fixed_parameters(model):
        drawn = list(stream(model, prompts, max_new_tokens=max_new_tokens, use_cache=use_cache, ends=ends, **options))
    new = torch.stack(drawn, 1) if drawn else None  # [B, max_new_tokens], or fewer where all rows are complete
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
) -> Iterator[Tensor]:
    """The tokens of `generate` as they are drawn: up to max_new_tokens tensors [B], each yielded before the next is computed.

    Arguments, communication and errors: as of `generate`.
    """
    rows = _rows(prompts)
    draw = _Draw(temperature=temperature, top_k=top_k, top_p=top_p)
    _check(rows, max_new_tokens)
    if pipeline_of(model) is not None:
        raise ValueError(
            f"this {type(model).__name__} is cut into stages, and each token would wait for all of them in turn; "
            f"save_pretrained(model, folder), and generate with from_pretrained(folder), on one process or a mesh without 'pp'"
        )
    if use_cache and not hasattr(model, "make_cache"):
        raise ValueError(f"a {type(model).__name__} has no make_cache(capacity); generate with use_cache=False")
    rotary = getattr(getattr(model, "config", None), "rotary", None)
    if rotary is not None and rotary.depends_on_length and len({len(row) for row in rows}) > 1:
        # The angles follow from the longest row of a call: rows of several lengths are read one by one.
        apart = [
            _stream(model, [row], max_new_tokens, draw, seed, use_cache, tuple(ends), n) for n, row in enumerate(rows)
        ]
        return _side_by_side(apart)
    return _stream(model, rows, max_new_tokens, draw, seed, use_cache, tuple(ends))


def _side_by_side(streams: list[Iterator[Tensor]]) -> Iterator[Tensor]:
    """The tokens of several streams of one row each; a complete stream repeats its last token."""
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
) -> Iterator[Tensor]:
    contexts = _Contexts(rows, max_new_tokens, model, use_cache)
    numbers = _numbers(rows, max_new_tokens, seed, first_row) if draw.temperature else None  # [max_new_tokens, B, 1]
    known = torch.tensor(ends, dtype=torch.int64, device=rows[0].device)
    complete = torch.zeros(len(rows), dtype=torch.bool, device=rows[0].device)
    last = torch.zeros(len(rows), dtype=torch.int64, device=rows[0].device)
    for step in range(max_new_tokens):
        with torch.no_grad():
            logits = contexts.read()  # [B, V]
            _check_logits(logits, step)
            chosen = logits.argmax(-1) if numbers is None else _pick(logits, draw, numbers[step])
            if ends:
                chosen = last = torch.where(complete, last, chosen)
                complete = complete | torch.isin(chosen, known)
            contexts.append(chosen)
        yield chosen.to(rows[0].dtype)
        if ends and bool(complete.all()):
            return


class _Contexts:
    """What the model reads of each row. Rows end in the same column; the shorter are padded on the left.

    lengths: of the rows, new tokens included.
    """

    def __init__(self, rows: list[Tensor], max_new_tokens: int, model: nn.Module, use_cache: bool) -> None:
        config: Any = model.config
        self.lengths = [len(row) for row in rows]
        self._model: Any = model
        rotary = getattr(config, "rotary", None)
        self._limit: int = config.max_seq_len if rotary is None else rotary.longest
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


def _numbers(rows: list[Tensor], count: int, seed: int, first_row: int) -> Tensor:
    """Uniform numbers, [count, B, 1] of float64: each a function of (seed, row, tokens before it)."""
    drawn = []
    for row, tokens in enumerate(rows, first_row):
        key, before = derive_key(seed, "generate", row), len(tokens)
        drawn.append(uniform((before + count,), key, device=tokens.device)[before:].double())
    return torch.stack(drawn, 1).unsqueeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """How a token is drawn; as of `generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be >= 0, and 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be >= 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1, or None for all tokens")


def _pick(logits: Tensor, draw: _Draw, numbers: Tensor) -> Tensor:
    """[B, V] and [B, 1] -> [B]: the first token whose share of the kept probability, summed, passes its row's number."""
    cumulative = kept(logits.double() / draw.temperature, draw.top_k, draw.top_p).softmax(-1).cumsum(-1)  # [B, V]
    place = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return place.clamp_(max=cumulative.shape[-1] - 1).squeeze(1)


def kept(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """The logits [B, V], with -inf at tokens that are not drawn, as transformers' TopKLogitsWarper and TopPLogitsWarper have them."""
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
    """[N] -> the tokens up to the first end, that end included."""
    for place, token in enumerate(tokens.tolist() if ends else ()):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def _check_logits(logits: Tensor, step: int) -> None:
    """Raises LogitsNotFinite where a row has no largest logit that is a number."""
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        raise LogitsNotFinite(
            f"the model's logits for new token {step} of row {int(bad.nonzero()[0])} are NaN or infinite, so no token can be drawn; "
            f"look for NaN in the weights, or load the model in float32"
        )


def end_ids(folder: str | Path, default: Sequence[int] = ()) -> tuple[int, ...]:
    """The end tokens of the model in a folder: eos_token_id of generation_config.json, else of config.json, else `default`.

    default: such as the end of the folder's tokenizer.
    Raises ValueError for a file without JSON, and an eos_token_id that is neither the number of a token nor a list of such numbers.
    """
    for file in (Path(folder) / name for name in ("generation_config.json", "config.json")):
        if not file.is_file():
            continue
        found = read_json(file, "fetch or save it again").get("eos_token_id")
        if found is None or found == []:
            continue
        several = found if isinstance(found, list) else [found]
        if not all(type(each) is int and 0 <= each < 2**31 for each in several):
            raise ValueError(
                f"{file}: eos_token_id is {found!r:.60}; it must be the number of a token, or a list of them"
            )
        return tuple(several)
    return tuple(default)


def _rows(prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(prompts, Tensor) and prompts.ndim != 2:
        raise ValueError(f"generate takes prompts [B, T], or several of [T], got shape {tuple(prompts.shape)}")
    if not len(prompts):
        raise ValueError("generate was given no prompts; give one or more")
    return list(prompts)


def _check(rows: list[Tensor], max_new_tokens: int) -> None:
    for row, tokens in enumerate(rows):
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"prompts[{row}] has shape {tuple(tokens.shape)}; give a prompt of one token or more: [T]")
    if not 0 <= max_new_tokens <= MOST_NEW_TOKENS:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be >= 0, and at most {MOST_NEW_TOKENS:,}")
