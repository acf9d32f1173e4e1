"""How tokens are cut into chunks, and that their number changes no error."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.cross_entropy.options import Options
from weft.kernels.linear_cross_entropy.chunks import HELD_BYTES_ON_CPU, chunks_of, part_tokens, parts_of
from weft.kernels.linear_cross_entropy.sharded.agreement import check_sizes, sizes_of

from tests.kernels.cross_entropy.cases import max_error
from tests.kernels.linear_cross_entropy.cases import make, oracle, run

SHAPES = (((4096,), torch.bfloat16), ((), torch.int64))
GRADIENTS = (None, torch.bfloat16, torch.float32)  # None: frozen


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_anchor_3_the_error_of_the_weights_gradient_is_flat_in_the_number_of_chunks(device, dtype, reduction):
    """Accumulated in bf16 over a hundred chunks the error grew: addends soon fall below half an ulp of the sum."""
    case = make((64,), 5, device, dtype, reduction, H=4)
    with torch.no_grad():
        case.input.abs_()
    case.target[:] = 3  # all tokens have the same class, so the sum grows with each
    _, truth = oracle(case, torch.float64, reduction=reduction)
    errors = [max_error(run(case, reduction=reduction, chunk_tokens=n)[1][1], truth[1]) for n in (64, 1)]
    assert max(errors) <= 1.5 * errors[0] + torch.finfo(dtype).eps / 2 * float(truth[1].abs().max())


def test_chunks_are_whole_tiles_and_cover_all_tokens():
    like = torch.empty(0, dtype=torch.bfloat16)
    for tokens in (0, 1, 127, 128, 1000, 16384, 100_003):
        for classes in (1, 5, 128256, 1 << 30):
            chunks = chunks_of(tokens, None, classes, 1, like, 0)
            assert [row for rows in chunks for row in (rows.start, rows.stop)] == sorted(
                row for rows in chunks for row in (rows.start, rows.stop)
            )
            assert sum(rows.stop - rows.start for rows in chunks) == tokens
            sizes = {rows.stop - rows.start for rows in chunks[:-1]}
            part = part_tokens(classes, 1, like)
            assert all(nbytes_of(size, part, classes) <= HELD_BYTES_ON_CPU or size == 1 for size in sizes)
            assert all(size % 128 == 0 or size < 128 for size in sizes)


def nbytes_of(tokens: int, part: int, classes: int) -> int:
    """A chunk's bytes: the gradient of its logits in 16 bits, and the logits of one part in float32."""
    return classes * (2 * tokens + 4 * min(tokens, part))


@pytest.mark.parametrize(("tokens", "part"), [(0, 128), (1, 128), (128, 128), (1000, 128), (1000, 384), (7, None)])
def test_parts_cover_their_chunk(tokens, part):
    parts = parts_of(slice(50, 50 + tokens), part)
    assert [row for rows in parts for row in range(rows.start, rows.stop)] == list(range(50, 50 + tokens))
    assert all(rows.stop - rows.start == (part or tokens) for rows in parts[:-1])


def test_wide_factors_have_their_logits_at_once():
    """The gradient takes the place of the logits."""
    assert [part_tokens(128256, 1, torch.empty(0, dtype=dtype)) for dtype in (torch.float32, torch.float64)] == [
        None
    ] * 2


class OnGpu:
    """The properties of a tensor that the choice of chunks reads."""

    device, itemsize = torch.device("cuda"), 2


def test_on_a_gpu_128256_classes_and_what_sums_them_take_less_than_1_1_gb():
    sum_bytes, part = 128256 * 4096, part_tokens(128256, 1, OnGpu())
    assert part == 256
    for tokens, expected in ((3584, 3584), (4096, 1408), (16384, 1536)):
        sizes = [rows.stop - rows.start for rows in chunks_of(tokens, None, 128256, 1, OnGpu(), sum_bytes)]
        assert max(sizes) == expected and sum(sizes) == tokens
        assert nbytes_of(expected, part, 128256) + (sum_bytes if len(sizes) > 1 else 0) <= 1.1e9


def test_on_a_gpu_a_sum_in_24_bits_leaves_chunks_half_the_memory_at_least():
    for H, expected in ((1024, 3072), (4096, 1536), (16384, 1536)):
        sizes = {rows.stop - rows.start for rows in chunks_of(10 * expected, None, 128256, 1, OnGpu(), 128256 * H)}
        assert sizes == {expected}
    assert len(chunks_of(3584, None, 128256, 1, OnGpu(), 128256 * 4096)) == 1  # no sum over chunks


def test_ranks_that_would_take_other_chunks_for_a_gradient_of_float32_are_told():
    input, target = (torch.empty(16384, *dims, dtype=dtype, device="meta") for dims, dtype in SHAPES)
    sizes = [sizes_of(input, target, torch.bfloat16, (dtype,) * 3, None, 128256, 1, Options()) for dtype in GRADIENTS]
    assert [each.chunk for each in sizes] == [1536, 1536, 3328]
    with pytest.raises(
        ValueError, match=r"at a time: 1536 on rank 1, 3328 on rank 2; .* gradients have the same dtype"
    ):
        check_sizes([0, 1, 2], [list(map(float, each)) for each in sizes])
