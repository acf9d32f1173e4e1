"""The tokens around each document of a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The tokens before and after each document."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def around_documents(tokenizer: Tokenizer, *, bos: bool | None = None, eos: bool = True) -> Around:
    """The tokens to put before and after each document.

    bos: True begins documents with the tokenizer's BOS token, False with no token. None begins documents as prompts
        begin: with the tokens that the tokenizer puts before a prompt, if any.
    eos: whether documents end with the tokenizer's end token.
    Raises ValueError for bos=True where the tokenizer names no BOS token.
    """
    begin = tokenizer.begin
    if bos is False:
        begin = ()
    elif bos and not begin:
        if tokenizer.bos is None:
            raise ValueError(
                "--bos puts the tokenizer's bos_token before each document, and the tokenizer names none; "
                "leave out --bos"
            )
        begin = (tokenizer.bos,)
    return Around(begin=begin, end=(tokenizer.end,) if eos else ())
