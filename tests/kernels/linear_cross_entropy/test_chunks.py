"""How tokens are cut into chunks, and that their number changes no error."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.cross_entropy.options import Options
from weft.kernels.linear_cross_entropy.chunks import HELD_BYTES_ON_CPU, chunks_of
from weft.kernels.linear_cross_entropy.sharded.agreement import check_sizes, sizes_of

from tests.kernels.cross_entropy.cases import max_error
from tests.kernels.linear_cross_entropy.cases import make, oracle, run

SHAPES = (((4096,), torch.bfloat16), ((), torch.int64))
GRADIENTS = (None, torch.bfloat16, torch.float32)  # None: frozen


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_anchor_3_the_error_of_the_weights_gradient_is_flat_in_the_number_of_chunks(device, dtype, reduction):
    """Accumulated in bf16 over a hundred chunks it diverged: what is added is soon below half an ulp of the sum."""
    case = make((64,), 5, device, dtype, reduction, H=4)
    with torch.no_grad():
        case.input.abs_()
    case.target[:] = 3  # so that all tokens pull the same class, and the sum grows with each
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
            assert all(size * classes * 2 <= HELD_BYTES_ON_CPU or size == 1 for size in sizes)
            assert all(size % 128 == 0 for size in sizes if classes < 1 << 17)


class OnGpu:
    """As much of a tensor as the choice of chunks looks at."""

    device, itemsize = torch.device("cuda"), 2


def test_on_a_gpu_4096_tokens_of_128256_classes_are_one_chunk_of_less_than_1_1_gb():
    (chunk,) = chunks_of(4096, None, 128256, 1, OnGpu(), 0)
    assert (chunk.stop - chunk.start) * 128256 * 2 <= 1.1e9
    assert [rows.stop for rows in chunks_of(16384, None, 128256, 1, OnGpu(), 0)] == [4096, 8192, 12288, 16384]


def test_on_a_gpu_a_sum_in_24_bits_leaves_chunks_half_the_memory_at_least():
    for H, expected in ((1024, 3584), (4096, 2048), (16384, 2048)):
        sizes = {rows.stop - rows.start for rows in chunks_of(10 * expected, None, 128256, 1, OnGpu(), 128256 * H)}
        assert sizes == {expected}
    assert len(chunks_of(4096, None, 128256, 1, OnGpu(), 128256 * 4096)) == 1  # no sum over chunks


def test_ranks_that_would_take_other_chunks_for_a_gradient_of_float32_are_told():
    input, target = (torch.empty(16384, *dims, dtype=dtype, device="meta") for dims, dtype in SHAPES)
    sizes = [sizes_of(input, target, torch.bfloat16, (dtype,) * 3, None, 128256, 1, Options()) for dtype in GRADIENTS]
    assert [each.chunk for each in sizes] == [1024, 1024, 2048]
    with pytest.raises(
        ValueError, match=r"at a time: 1024 on rank 1, 2048 on rank 2; .* gradients have the same dtype"
    ):
        check_sizes([0, 1, 2], [list(map(float, each)) for each in sizes])
