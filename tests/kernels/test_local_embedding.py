"""The local computation of embedding: ids have no gradient, and the result follows from this rank's rows."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from weft import kernels
from weft.kernels.dispatch.sharded import apply
from weft.kernels.embedding import function as embedding

from tests.kernels.test_local_ops import normal, op, with_gradients


@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (3, 0)], ids=str)
def test_embedding(shape):
    weight = normal(11, 4)
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))
    output, (_, dweight) = with_gradients(lambda *t: apply(op(embedding), *t), [tokens, weight])
    expected, (_, wanted) = with_gradients(F.embedding, [tokens, weight])
    assert torch.equal(output, expected)
    torch.testing.assert_close(dweight, wanted)
    leaf = weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: apply(op(embedding), tokens, w), (leaf,))


@pytest.mark.parametrize(
    "cuts", [[0, 4, 8, 11], [0, 11, 11], [0, 0, 5, 11]], ids=["uneven", "empty-last", "empty-first"]
)
@pytest.mark.parametrize("padding_idx", [None, 10], ids=["all-rows", "padding"])
def test_embedding_of_a_ranks_rows_sums_to_the_whole(cuts, padding_idx):
    weight, tokens = normal(11, 4), torch.tensor([[0, 3, 4, 10], [10, 10, 7, 8]])
    grad = normal(2, 4, 4)
    whole, (_, wanted) = with_gradients(partial(F.embedding, padding_idx=padding_idx), [tokens, weight], grad)
    outputs, gradients = [], []
    for start, stop in itertools.pairwise(cuts):
        options = {"vocab_start": start, "vocab_size": 11, "padding_idx": padding_idx}
        part, (_, gradient) = with_gradients(
            lambda *t, options=options: apply(op(embedding), *t, **options), [tokens, weight[start:stop]], grad
        )
        assert gradient.shape == (stop - start, 4)
        outputs.append(part)
        gradients.append(gradient)
    assert torch.equal(sum(outputs), whole)
    torch.testing.assert_close(torch.cat(gradients), wanted)


def test_embedding_gradient_sums_in_float32():
    weight, tokens = normal(3, 2, dtype=torch.bfloat16).requires_grad_(), torch.ones(1000, dtype=torch.long)
    apply(op(embedding), tokens, weight).sum().backward()
    assert weight.grad.tolist() == [[0, 0], [1000, 1000], [0, 0]]  # a bfloat16 sum of ones stops at 256


def test_embedding_names_a_padding_row_outside_the_table():
    with pytest.raises(ValueError, match=r"padding_idx is 11, outside the table of 11 rows; give one of -11 to 10"):
        kernels.embedding(torch.tensor([1]), normal(11, 4), padding_idx=11)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        pytest.param([[1, 2], [11, 0]], r"tokens\[1, 0\] is 11, outside the table of 11 rows", id="too-large"),
        pytest.param([[1, -1]], r"tokens\[0, 1\] is -1", id="negative"),
    ],
)
def test_embedding_names_the_token_outside_the_table(tokens, message):
    for weight, options in [(normal(11, 4), {}), (normal(4, 4), {"vocab_start": 4, "vocab_size": 11})]:
        with pytest.raises(ValueError, match=message):
            apply(op(embedding), torch.tensor(tokens), weight, **options)
