"""`PromptCache`: keys and values kept from one call of `stream` to the next, as in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from weft.kernels import KeyValueCache

LEAST_CAPACITY = 1024  # tokens; the caches of a short context take less


class PromptCache:
    """The keys and values of one row's tokens, for further calls of `stream` with the same model.

    The tokens of a prompt which continue the tokens of the last call, drawn ones included, are the only ones that the
    model reads. A prompt with another beginning is correct, too: the cache keeps the beginning in common.
    """

    def __init__(self) -> None:
        self._caches: Sequence[KeyValueCache] = ()
        self._tokens: Tensor | None = None  # [N]: begins with the tokens in the cache

    def prepare(self, model: nn.Module, tokens: Tensor, length: int, limit: int) -> tuple[Sequence[KeyValueCache], int]:
        """The caches of the model's layers, and the number of `tokens` whose keys and values these hold.

        tokens: [N], the context's tokens and room for the tokens to draw, which the caller writes into the tensor.
        length: the number of tokens in the context. At least the last one is left to read. limit: the longest context.
        """
        known = 0
        if self._tokens is not None and not depends_on_length(model):
            # The layers' lengths differ after an exception in the middle of a call, such as KeyboardInterrupt.
            held = min(each.length for each in self._caches)
            compared = min(held, length - 1)
            differing = (self._tokens[:compared] != tokens[:compared]).nonzero()
            known = int(differing[0]) if len(differing) else compared
        room = min(limit, len(tokens))
        if not self._caches or self._caches[0].capacity < room:
            any_model: Any = model
            # Twice the room, so that a growing conversation is read anew only each time its length doubles.
            self._caches, known = any_model.make_cache(min(limit, max(2 * room, LEAST_CAPACITY))), 0
        for each in self._caches:
            each.length = known
        self._tokens = tokens
        return self._caches, known


def depends_on_length(model: nn.Module) -> bool:
    """Whether a token's keys depend on the number of tokens after it, as with dynamic rope scaling."""
    rotary = getattr(getattr(model, "config", None), "rotary", None)
    return rotary is not None and bool(rotary.depends_on_length)
