"""Generation: transformers' greedy tokens; drawing by seed and position; on every rank the tokens of one device."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from weft.mesh import Layout, ProcessMesh
from weft.models import GPT, GPTConfig, Llama, initialize, parallelize, save_pretrained
from weft.models.cli.generate import run
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.generation import generate, stream
from weft.reshard import distribute, layout_of

from tests.models.cases import SMALL, make, some_tokens, theirs


def test_greedy_generation_is_that_of_transformers():
    model = make(SMALL)
    prompt = some_tokens(SMALL, 2, 5)
    expected = theirs(model).generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=12), expected)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_head_reads_the_last_position_alone(family):
    model = (
        make(SMALL) if family == "llama" else GPT(GPTConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4))
    )
    if family == "gpt":
        initialize(model, 0)
    prompt, read = some_tokens(SMALL, 2, 5), []
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].shape))
    generate(model, prompt, max_new_tokens=3)
    generate(model, prompt, max_new_tokens=2, use_cache=False)
    handle.remove()
    assert read == [(2, 1, 32)] * 5
    torch.testing.assert_close(model(prompt, last=True), model(prompt)[:, -1:])


OPTIONS = [pytest.param({}, id="greedy"), pytest.param({"temperature": 1.0, "top_k": 9, "seed": 4}, id="drawn")]


@pytest.mark.few(1)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("limit", [8, 7, 1])
def test_a_full_context_goes_on_with_its_last_half(limit, use_cache):
    model = make(dataclasses.replace(SMALL, max_seq_len=limit))
    tokens = generate(model, some_tokens(SMALL, 2, 6), max_new_tokens=14, use_cache=use_cache)
    assert tokens.shape == (2, 20)
    start, half = 0, (limit + 1) // 2
    for stop in range(6, 20):
        while stop - start > limit:
            start += half
        assert torch.equal(tokens[:, stop], model(tokens[:, start:stop])[:, -1].argmax(-1))


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_without_a_cache(options):
    model = make(dataclasses.replace(SMALL, max_seq_len=12))
    for prompts in (some_tokens(SMALL, 3, 5), some_tokens(SMALL, 1, 30)):
        found, expected = (
            generate(model, prompts, max_new_tokens=20, use_cache=use_cache, **options) for use_cache in (True, False)
        )
        assert torch.equal(found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_prompts_of_different_lengths_are_each_as_alone(use_cache):
    """Also where the context of a single prompt is full, and is read anew."""
    model = make(dataclasses.replace(SMALL, max_seq_len=16))
    prompts = [some_tokens(SMALL, 1, n)[0] for n in (9, 3, 14, 1, 40)]
    found = generate(model, prompts, max_new_tokens=20, use_cache=use_cache)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert torch.equal(tokens, generate(model, prompt.unsqueeze(0), max_new_tokens=20)[0])
    drawn = [generate(model, prompts, max_new_tokens=20, temperature=1.0, use_cache=each) for each in (True, use_cache)]
    assert all(map(torch.equal, *drawn))
    assert [len(tokens) for tokens in drawn[0]] == [29, 23, 34, 21, 60]
    first = generate(model, prompts[0].unsqueeze(0), max_new_tokens=20, temperature=1.0)
    assert torch.equal(drawn[0][0], first[0])


def test_prompts_of_different_lengths_are_those_of_transformers():
    model = make(SMALL)
    prompts = [some_tokens(SMALL, 1, n)[0] for n in (9, 3)]
    padded = torch.stack((prompts[0], torch.cat((torch.zeros(6, dtype=torch.int64), prompts[1]))))
    mask = torch.ones_like(padded)
    mask[1, :6] = 0
    expected = theirs(model).generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    found = generate(model, prompts, max_new_tokens=12)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1, 6:])


def test_tokens_are_streamed_as_the_model_reads():
    model, prompt, read = make(SMALL), some_tokens(SMALL, 2, 5), []
    model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    tokens = stream(model, prompt, max_new_tokens=4)
    first = next(tokens)
    assert read == [(2, 5)]
    rest = list(tokens)
    assert read == [(2, 5), (2, 1), (2, 1), (2, 1)]
    assert torch.equal(torch.stack([first, *rest], 1), generate(model, prompt, max_new_tokens=4)[:, 5:])


class Told:
    """A stream for stdout that records its text, and at each flush the number of tokens read by the model."""

    def __init__(self, read):
        self.read, self.text, self.flushed = read, "", []

    def write(self, text):
        self.text += text

    def flush(self):
        self.flushed.append(sum(self.read))

    def isatty(self):
        return False


def test_the_command_prints_each_byte_as_it_is_drawn(tmp_path, monkeypatch):
    model, read = make(dataclasses.replace(SMALL, vocab_size=257)), []
    save_pretrained(model, tmp_path / "model")
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: read.append(args[0].shape[1]) if isinstance(module, Llama) else None
    )
    monkeypatch.setattr("sys.stdout", told := Told(read))
    try:
        assert run([str(tmp_path / "model"), "--prompt", "äb", "--tokens", "3", "--temperature", "0"]) == 0
    finally:
        hook.remove()
    monkeypatch.undo()
    expected = generate(model, torch.tensor([byte_tokenizer().encode("äb")]), max_new_tokens=3)[0].tolist()
    assert told.text == byte_tokenizer().decode(expected) + "\n"
    assert told.flushed == [0, 3, 4, 5, 5]  # the prompt, three tokens, and the possible rest of a character


def test_a_stream_leaves_gradients_as_they_are():
    for _ in stream(make(SMALL), some_tokens(SMALL, 1, 2), max_new_tokens=2):
        assert torch.is_grad_enabled()


def test_drawn_tokens_depend_on_seed_and_position_alone():
    model, prompt = make(SMALL), some_tokens(SMALL, 2, 5)
    drawn = generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7)
    torch.manual_seed(1)
    assert torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7), drawn)
    assert torch.equal(generate(model, drawn[:, :9], max_new_tokens=6, temperature=1.0, seed=7), drawn)
    assert not torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=8), drawn)
    assert torch.equal(generate(model, prompt, max_new_tokens=0), prompt)
    assert generate(model, prompt.int(), max_new_tokens=1).dtype == torch.int32


def test_top_k():
    model, prompt = make(SMALL), some_tokens(SMALL, 2, 5)
    greedy = generate(model, prompt, max_new_tokens=10)
    assert torch.equal(generate(model, prompt, max_new_tokens=10, temperature=2.0, top_k=1), greedy)
    drawn = generate(model, prompt, max_new_tokens=10, temperature=50.0, top_k=3)
    for t in range(5, 15):
        likeliest = model(drawn[:, :t])[:, -1].topk(3).indices
        assert (likeliest == drawn[:, t : t + 1]).any(-1).all()
    assert generate(model, prompt, max_new_tokens=1, temperature=1.0, top_k=1000).shape == (2, 6)


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])

    class Fixed(torch.nn.Module):
        config = SMALL

        def forward(self, tokens):
            return logits.expand(*tokens.shape, 4)

    n = 1000
    drawn = generate(Fixed(), torch.zeros(1, 1, dtype=torch.long), max_new_tokens=n, temperature=0.5, use_cache=False)[
        0, 1:
    ]
    expected = F.softmax(logits / 0.5, 0)
    error = (torch.bincount(drawn, minlength=4) / n - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / n) ** 0.5 + 1e-3).all()


class WithLayout(torch.nn.Module):
    """A model whose logits come laid out, as a parallel model's do."""

    def __init__(self, model, layout):
        super().__init__()
        self.model, self.config, self.layout = model, model.config, layout

    def forward(self, tokens, **options):
        return distribute(self.model(tokens, **options), self.layout)

    def make_cache(self, capacity):
        return self.model.make_cache(capacity)


def generate_in_parallel(text, options):
    model = WithLayout(make(SMALL), Layout(ProcessMesh.grid(dp=2, tp=2), text))
    return generate(model, some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)


@pytest.mark.parametrize("text", ["tp: S(2)", "dp: S(0), tp: S(2)", "tp: S(1)", "dp: P(sum)"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 9}], ids=["greedy", "drawn"])
def test_every_rank_generates_what_one_device_does(pool, text, options):
    expected = generate(make(SMALL), some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)
    for tokens in pool.run(generate_in_parallel, text, options):
        assert torch.equal(tokens, expected)


def generate_by_heads(sequence, options):
    """Outputs for prompts of equal and of different lengths, with and without a cache; and the cache's layout."""
    mesh = ProcessMesh.grid(tp=2)
    model = make(dataclasses.replace(SMALL, max_seq_len=16))
    parallelize(model, mesh, dataclasses.replace(model.parallel_plan(), sequence=sequence))
    found = [
        generate(model, prompts, max_new_tokens=12, use_cache=use_cache, **options)
        for prompts in (some_tokens(SMALL, 3, 6), [some_tokens(SMALL, 1, n)[0] for n in (9, 3, 20)])
        for use_cache in (True, False)
    ]
    (cache, *_) = kept = model.make_cache(5)
    with torch.no_grad():
        model(some_tokens(SMALL, 3, 4), cache=kept)
    keys, _ = cache.room_for(distribute(torch.zeros(3, 1, 16), Layout(mesh, "tp: S(2)")))
    return found, tuple(keys.to_local().shape), str(layout_of(keys))


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("options", OPTIONS)
def test_paddlenlp_9412_a_parallel_model_generates_what_one_device_does(pool, sequence, options):
    model = make(dataclasses.replace(SMALL, max_seq_len=16))
    together = generate(model, some_tokens(SMALL, 3, 6), max_new_tokens=12, **options)
    several = generate(model, [some_tokens(SMALL, 1, n)[0] for n in (9, 3, 20)], max_new_tokens=12, **options)
    for found, held, layout in pool.run(generate_by_heads, sequence, options, ranks=2):
        assert torch.equal(found[0], together) and torch.equal(found[1], together)
        assert all(map(torch.equal, found[2], several)) and all(map(torch.equal, found[3], several))
        assert held == (3, 5, 8) and layout == "tp: S(2)"  # one of two heads of 8


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        pytest.param((2, 0), {}, "give a prompt", id="empty-prompt"),
        pytest.param((0, 3), {}, "no prompts; give at least one", id="no-prompts"),
        pytest.param((3,), {}, r"prompts \[B, T\]", id="no-batch"),
        pytest.param((2, 3), {"max_new_tokens": -1}, "max_new_tokens is -1", id="max_new_tokens"),
        pytest.param((2, 3), {"temperature": -0.5}, "temperature is -0.5", id="temperature"),
        pytest.param((2, 3), {"temperature": float("nan")}, "temperature is nan", id="nan-temperature"),
        pytest.param((2, 3), {"top_k": 0}, "top_k is 0", id="top_k"),
    ],
)
def test_generation_names_a_bad_argument(shape, options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(SMALL), torch.zeros(shape, dtype=torch.long), **{"max_new_tokens": 1, **options})


def test_a_model_without_a_cache_is_named():
    with pytest.raises(ValueError, match=r"a Linear has no make_cache\(capacity\); generate with use_cache=False"):
        stream(torch.nn.Linear(2, 2), torch.zeros(1, 1, dtype=torch.long), max_new_tokens=1)
