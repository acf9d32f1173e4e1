"""Generation: greedy as transformers does, drawn by seed and position, on every rank what one device gives."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from weft.mesh import Layout, ProcessMesh
from weft.models.generation import generate
from weft.reshard import distribute

from tests.models.cases import SMALL, make, some_tokens, theirs


def test_greedy_generation_is_that_of_transformers():
    model = make(SMALL)
    prompt = some_tokens(SMALL, 2, 5)
    expected = theirs(model).generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=12), expected)


def test_generation_crops_its_context():
    model = make(dataclasses.replace(SMALL, max_seq_len=8))
    tokens = generate(model, some_tokens(SMALL, 2, 6), max_new_tokens=9)
    assert tokens.shape == (2, 15)
    assert torch.equal(tokens[:, -1], model(tokens[:, -9:-1])[:, -1].argmax(-1))


def test_drawn_tokens_depend_on_seed_and_position_alone():
    model, prompt = make(SMALL), some_tokens(SMALL, 2, 5)
    drawn = generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7)
    torch.manual_seed(1)
    assert torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=7), drawn)
    assert torch.equal(generate(model, drawn[:, :9], max_new_tokens=6, temperature=1.0, seed=7), drawn)
    assert not torch.equal(generate(model, prompt, max_new_tokens=10, temperature=1.0, seed=8), drawn)
    assert torch.equal(generate(model, prompt, max_new_tokens=0), prompt)


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

    n = 4000
    drawn = generate(Fixed(), torch.zeros(n, 1, dtype=torch.long), max_new_tokens=1, temperature=0.5)[:, 1]
    expected = F.softmax(logits / 0.5, 0)
    error = (torch.bincount(drawn, minlength=4) / n - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / n) ** 0.5 + 1e-3).all()


class WithLayout(torch.nn.Module):
    """A model whose logits come laid out, as a parallel model's do."""

    def __init__(self, model, layout):
        super().__init__()
        self.model, self.config, self.layout = model, model.config, layout

    def forward(self, tokens):
        return distribute(self.model(tokens), self.layout)


def generate_in_parallel(text, options):
    model = WithLayout(make(SMALL), Layout(ProcessMesh.grid(dp=2, tp=2), text))
    return generate(model, some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)


@pytest.mark.parametrize("text", ["tp: S(2)", "dp: S(0), tp: S(2)", "tp: S(1)", "dp: P(sum)"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 9}], ids=["greedy", "drawn"])
def test_every_rank_generates_what_one_device_does(pool, text, options):
    expected = generate(make(SMALL), some_tokens(SMALL, 3, 5), max_new_tokens=6, **options)
    for tokens in pool.run(generate_in_parallel, text, options):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        pytest.param((2, 0), {}, "give a prompt", id="empty-prompt"),
        pytest.param((3,), {}, r"tokens \[B, T\]", id="no-batch"),
        pytest.param((2, 3), {"max_new_tokens": -1}, "max_new_tokens is -1", id="max_new_tokens"),
        pytest.param((2, 3), {"temperature": -0.5}, "temperature is -0.5", id="temperature"),
        pytest.param((2, 3), {"temperature": float("nan")}, "temperature is nan", id="nan-temperature"),
        pytest.param((2, 3), {"top_k": 0}, "top_k is 0", id="top_k"),
    ],
)
def test_generation_names_a_bad_argument(shape, options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(SMALL), torch.zeros(shape, dtype=torch.long), **{"max_new_tokens": 1, **options})
