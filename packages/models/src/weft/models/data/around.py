"""The tokens around each document of a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass

from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The tokens before each document and after it."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def around_documents(tokenizer: Tokenizer, *, bos: bool | None = None, eos: bool = True) -> Around:
    """The tokens that are put around each document.

    bos: whether a document begins with the tokenizer's BOS token; where None, with the tokens that the tokenizer puts before a
    prompt, if any, so that documents begin as prompts do. eos: whether it ends with the tokenizer's end.
    Raises ValueError where a BOS token is asked for, and the tokenizer names none.
    """
    begin = tokenizer.begin
    if bos is False:
        begin = ()
    elif bos and not begin:
        if tokenizer.bos is None:
            raise ValueError(
                "--bos puts the tokenizer's bos_token before each document, and the tokenizer names none; leave out --bos"
            )
        begin = (tokenizer.bos,)
    return Around(begin=begin, end=(tokenizer.end,) if eos else ())
