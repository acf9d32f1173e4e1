"""A `PromptCache` changes which tokens the model reads, and no token of the result."""

import dataclasses

import pytest
import torch
from weft.models import PromptCache, generate, prompt_cache, stream
from weft.models.rope_scaling import DynamicRopeScaling

from tests.models.cases import SMALL, make, some_tokens


def drawn(model, prompt, count, **options):
    new = [tokens.unsqueeze(1) for tokens in stream(model, prompt, max_new_tokens=count, **options)]
    return torch.cat([prompt, *new], 1)


def read_by(model):
    """A list that receives the number of tokens of each call of the model."""
    counts = []
    model.embed_tokens.register_forward_pre_hook(lambda module, inputs: counts.append(inputs[0].shape[1]))
    return counts


def test_a_continued_prompt_is_read_from_its_new_tokens_on():
    model, cache = make(SMALL), PromptCache()
    first = drawn(model, some_tokens(SMALL, 1, 6), 4, cache=cache)
    prompt = torch.cat((first, some_tokens(SMALL, 1, 3)), 1)
    expected, counts = generate(model, prompt, max_new_tokens=5), read_by(model)
    assert torch.equal(drawn(model, prompt, 5, cache=cache), expected)
    assert counts == [4, 1, 1, 1, 1], "the last drawn token and three new ones, and then one at a time"


@pytest.mark.parametrize("same", [0, 1, 5, 9], ids=lambda same: f"{same}-tokens-in-common")
def test_a_prompt_that_differs_is_read_from_the_first_other_token_on(same):
    model, cache = make(SMALL), PromptCache()
    first = drawn(model, some_tokens(SMALL, 1, 6), 4, cache=cache)
    prompt = torch.cat((first[:, :same], (first[:, same : same + 1] + 1) % SMALL.vocab_size, first[:, 2:5]), 1)
    expected, counts = generate(model, prompt, max_new_tokens=5), read_by(model)
    assert torch.equal(drawn(model, prompt, 5, cache=cache), expected)
    assert counts[0] == prompt.shape[1] - same


def test_the_same_prompt_and_a_shorter_one_are_read_from_their_last_token_on():
    model, cache = make(SMALL), PromptCache()
    prompt = some_tokens(SMALL, 1, 8)
    first = drawn(model, prompt, 4, cache=cache)
    counts = read_by(model)
    assert torch.equal(drawn(model, prompt, 4, cache=cache), first)
    assert torch.equal(drawn(model, prompt[:, :3], 2, cache=cache), generate(model, prompt[:, :3], max_new_tokens=2))
    assert counts[0] == counts[4] == 1


def test_a_growing_conversation_is_read_anew_seldom(monkeypatch):
    monkeypatch.setattr(prompt_cache, "LEAST_CAPACITY", 8)
    model, cache = make(dataclasses.replace(SMALL, max_seq_len=4096)), PromptCache()
    tokens, counts = some_tokens(SMALL, 1, 4), read_by(model)
    for _ in range(40):
        tokens = drawn(model, torch.cat((tokens, some_tokens(SMALL, 1, 2)), 1), 1, cache=cache)
    assert sum(counts) < 3 * tokens.shape[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [9, 8, 1])
def test_a_context_beyond_the_limit_goes_on_as_without_a_cache(limit):
    model, cache = make(dataclasses.replace(SMALL, max_seq_len=limit)), PromptCache()
    tokens = some_tokens(SMALL, 1, 5)
    for count in (2, 7, 0, 20):
        expected = generate(model, tokens, max_new_tokens=count)
        tokens = drawn(model, tokens, count, cache=cache)
        assert torch.equal(tokens, expected)


def test_keys_of_dynamic_scaling_are_computed_for_each_prompt():
    scaled = dataclasses.replace(SMALL, max_seq_len=8, rope_scaling=DynamicRopeScaling(factor=4.0))
    model, cache = make(scaled), PromptCache()
    first = drawn(model, some_tokens(scaled, 1, 6), 1, cache=cache)
    prompt = torch.cat((first, some_tokens(scaled, 1, 12)), 1)
    assert torch.equal(drawn(model, prompt, 4, cache=cache), generate(model, prompt, max_new_tokens=4))


def test_a_call_that_was_interrupted_between_two_layers_leaves_no_wrong_key():
    model, cache = make(SMALL), PromptCache()
    prompt = some_tokens(SMALL, 1, 8)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        drawn(model, prompt, 4, cache=cache)
    handle.remove()
    other = torch.cat((prompt[:, :4], some_tokens(SMALL, 1, 9)), 1)
    assert torch.equal(drawn(model, other, 4, cache=cache), generate(model, other, max_new_tokens=4))


def test_calls_that_a_cache_cannot_keep_are_refused():
    model, two = make(SMALL), some_tokens(SMALL, 2, 5)
    with pytest.raises(ValueError, match="stream has 2 prompts and a PromptCache; give one prompt"):
        next(stream(model, two, max_new_tokens=1, cache=PromptCache()))
    with pytest.raises(ValueError, match="stream has use_cache=False and a PromptCache; give"):
        next(stream(model, two[:1], max_new_tokens=1, cache=PromptCache(), use_cache=False))
