"""`PromptCache`: keys and values kept between calls of `stream`, as in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from weft.kernels import KeyValueCache

LEAST_CAPACITY = 1024  # tokens for which a cache is made at least, if the model's longest context allows


class PromptCache:
    """The keys and values of a row's tokens, for further calls of `stream` with the same model.

    The model reads only the part of a prompt after the longest common beginning with the tokens of the last call, drawn
    tokens included. A prompt without a common beginning is read whole.
    """

    def __init__(self) -> None:
        self._caches: Sequence[KeyValueCache] = ()
        self._tokens: Tensor | None = None  # [N]: begins with the tokens in the cache

    def prepare(self, model: nn.Module, tokens: Tensor, length: int, limit: int) -> tuple[Sequence[KeyValueCache], int]:
        """The caches of the model's layers, and the number of `tokens`, from the first, found in the caches.

        tokens: [N], the context's tokens, then room where the caller will write drawn tokens.
        length: the number of tokens in the context. The last token is never counted as found: the model must read it.
        limit: the longest context.
        """
        known = 0
        if self._tokens is not None and not depends_on_length(model):
            # The layers' lengths differ after an exception in the middle of a call, as KeyboardInterrupt.
            held = min(each.length for each in self._caches)
            compared = min(held, length - 1)
            differing = (self._tokens[:compared] != tokens[:compared]).nonzero()
            known = int(differing[0]) if len(differing) else compared
        room = min(limit, len(tokens))
        if not self._caches or self._caches[0].capacity < room:
            any_model: Any = model
            # Twice the room: a growing conversation is then read anew only when the length has doubled.
            self._caches, known = any_model.make_cache(min(limit, max(2 * room, LEAST_CAPACITY))), 0
        for each in self._caches:
            each.length = known
        self._tokens = tokens
        return self._caches, known


def depends_on_length(model: nn.Module) -> bool:
    """Whether a token's keys depend on the number of later tokens, as with dynamic rope scaling."""
    rotary = getattr(getattr(model, "config", None), "rotary", None)
    return rotary is not None and bool(rotary.depends_on_length)
