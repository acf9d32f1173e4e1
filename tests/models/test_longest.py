"""The longest context under each kind of rope scaling: as transformers generates, and where a context is halved."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
    from_pretrained,
)
from weft.models.generation import generate

from tests.models.cases import SMALL, make, some_tokens
from tests.models.folders import their_model

LLAMA3 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=4)
# By name: the rope scaling in config.json, and the longest context in tokens.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 16),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "linear-by-half": ({"rope_type": "linear", "factor": 1.5}, 24),
    "linear-shorter": ({"rope_type": "linear", "factor": 0.5}, 16),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 32),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    "yarn-of-max": ({"rope_type": "yarn", "factor": 2.5}, 40),
    "yarn-scaled-already": ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}, 16),
    "yarn-of-less": ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}, 16),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4,
        },
        16,
    ),
}


@pytest.fixture
def both(name: str, tmp_path: Path) -> tuple[Any, Any, int]:
    settings, longest = KINDS[name]
    theirs = their_model("llama", (), max_position_embeddings=16, rope_scaling=settings or None)
    theirs.save_pretrained(tmp_path / "model")
    return theirs, from_pretrained(tmp_path / "model").eval(), longest


@pytest.mark.exhaustive
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("name", KINDS)
def test_generation_is_that_of_transformers_up_to_the_longest_context(
    both: tuple[Any, Any, int], use_cache: bool
) -> None:
    theirs, ours, longest = both
    assert ours.config.rotary.longest == longest
    prompt = some_tokens(SMALL, 2, 5)
    expected = copy.deepcopy(theirs).generate(
        prompt,
        max_new_tokens=longest - 4,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        use_cache=use_cache,
    )
    assert torch.equal(generate(ours, prompt, max_new_tokens=longest - 4, use_cache=use_cache), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["linear", "yarn", "yarn-of-max", "llama3"])
def test_beyond_the_longest_context_its_last_half_is_read(both: tuple[Any, Any, int]) -> None:
    theirs, ours, longest = both
    found = generate(ours, some_tokens(SMALL, 1, 5), max_new_tokens=longest, use_cache=False)
    start = (longest + 1) // 2
    assert torch.equal(theirs(found[:, start : longest + 1]).logits[:, -1].argmax(-1), found[:, longest + 1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(LinearRopeScaling(factor=4.0), id="linear"),
        pytest.param(DynamicRopeScaling(factor=4.0), id="dynamic"),
        pytest.param(YarnRopeScaling(factor=4.0, original_max_seq_len=8), id="yarn"),
        pytest.param(LLAMA3, id="llama3"),
    ],
)
def test_prompts_of_different_lengths_are_each_as_alone(scaling: Any, use_cache: bool) -> None:
    model = make(dataclasses.replace(SMALL, max_seq_len=8, rope_scaling=scaling))
    prompts = [some_tokens(SMALL, 1, n)[0] for n in (9, 3, 14, 1)]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "use_cache": use_cache}
    found = generate(model, prompts, **options)
    first = generate(model, prompts[:1], **options)
    assert torch.equal(found[0], first[0])
    greedy = generate(model, prompts, max_new_tokens=30, use_cache=use_cache)
    for prompt, tokens in zip(prompts, greedy, strict=True):
        assert torch.equal(tokens, generate(model, prompt.unsqueeze(0), max_new_tokens=30, use_cache=use_cache)[0])
    ends = [int(greedy[1][5]), int(greedy[2][20])]
    stopped = generate(model, prompts, max_new_tokens=30, use_cache=use_cache, ends=ends)
    for tokens, free in zip(stopped, greedy, strict=True):
        assert torch.equal(tokens, free[: len(tokens)])
        assert len(tokens) == len(free) or int(tokens[-1]) in ends
