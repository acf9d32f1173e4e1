"""Generation by every family: greedy as transformers does it, with a cache and without, prompts of several lengths."""

import dataclasses

import pytest
import torch
from weft.models import from_pretrained
from weft.models.cli.generate import run
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.generation import generate

from tests.models.folders import their_model, tokens_for

MADE = {
    "llama-yarn": ("llama", ("yarn",)),
    "mistral-window": ("mistral", ("window",)),
    "mistral": ("mistral", ("no-window", "wide-heads")),
    "mixtral": ("mixtral", ("window",)),
    "qwen2-window": ("qwen2", ("window",)),
    "qwen3": ("qwen3", ("one-key-head",)),
    "qwen3-moe": ("qwen3_moe", ("every-second-layer",)),
    "gpt2": ("gpt2", ("scaled-by-layer",)),
}
each = pytest.mark.parametrize("name", MADE)


@pytest.fixture
def both(name, tmp_path):
    theirs = their_model(*MADE[name])
    theirs.save_pretrained(tmp_path / "model")
    return theirs, from_pretrained(tmp_path / "model").eval()


@pytest.mark.exhaustive
@each
def test_greedy_generation_is_that_of_transformers(both):
    theirs, ours = both
    prompt = tokens_for(theirs, T=5)
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    for use_cache in (True, False):
        assert torch.equal(generate(ours, prompt, max_new_tokens=12, use_cache=use_cache), expected)


@pytest.mark.exhaustive
@each
def test_prompts_of_different_lengths_are_each_as_alone_also_where_a_context_is_full(both):
    _, ours = both
    if ours.config.max_seq_len > 16 and not hasattr(ours, "wpe"):
        ours.config = dataclasses.replace(ours.config, max_seq_len=16)
    prompts = [tokens_for(ours, T=n)[0] for n in (9, 3, 14)]
    new = ours.config.max_seq_len
    for use_cache in (True, False):
        found = generate(ours, prompts, max_new_tokens=new, use_cache=use_cache)
        for prompt, tokens in zip(prompts, found, strict=True):
            assert torch.equal(tokens, generate(ours, prompt.unsqueeze(0), max_new_tokens=new)[0])


@each
def test_the_command_goes_on_with_a_prompt(name, tmp_path, capsys):
    kind, names = MADE[name]
    theirs = their_model(kind, names, vocab_size=257)
    theirs.save_pretrained(tmp_path / "model")
    assert run([str(tmp_path / "model"), "--prompt", "Call me", "--tokens", "4", "--temperature", "0"]) == 0
    prompt = torch.tensor([byte_tokenizer().encode("Call me")])
    expected = theirs.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert capsys.readouterr().out == byte_tokenizer().decode(expected[0].tolist()) + "\n"
