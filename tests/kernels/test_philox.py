"""Philox 4x32-10: the published answers, a function of (key, index) alone, and the shape of its distributions."""

import math

import pytest
import torch
from weft.kernels.random import philox

KEY = 0x0123456789ABCDEF


def signed(low: int, high: int) -> torch.Tensor:
    word = low | high << 32
    return torch.tensor([word - 2**64 if word >= 2**63 else word])


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # from Random123's kat_vectors
        pytest.param([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], id="zeros"),
        pytest.param([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD], id="ones"),
        pytest.param(
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            id="pi",
        ),
    ],
)
def test_known_answers(counter, key, answer):
    block = philox._blocks(signed(*counter[:2]), signed(*counter[2:]), key[0] | key[1] << 32)
    assert block.tolist() == [answer]


def philox_by_hand(index, key):
    """The same in Python's own integers."""
    counter, (k0, k1) = [index // 4 % 2**32, index // 4 >> 32, 0, 0], (key % 2**32, key >> 32)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [p1 >> 32 ^ counter[1] ^ k0, p1 % 2**32, p0 >> 32 ^ counter[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return counter[index % 4]


def test_element_i_reads_lane_i_mod_4_of_block_i_div_4():
    index = [0, 1, 2, 3, 4, 7, 1023, 2**34 + 5, 2**62 + 3, 2, 2]
    assert philox.bits(torch.tensor(index), KEY).tolist() == [philox_by_hand(i, KEY) for i in index]


@pytest.mark.parametrize("draw", [philox.bits, philox.uniform, philox.normal], ids=lambda draw: draw.__name__)
def test_a_number_depends_on_key_and_index_alone(draw):
    index = torch.arange(9 * 14).view(9, 14)
    whole = draw(index, KEY)
    assert torch.equal(draw(index[2:5, 3:8], KEY), whole[2:5, 3:8])
    shuffled = torch.randperm(index.numel(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(shuffled, KEY), whole.view(-1)[shuffled])
    assert not torch.equal(draw(index, KEY + 1), whole)
    assert draw(index[:0], KEY).shape == (0, 14)
    assert draw(torch.tensor(5), KEY) == whole[0, 5]


@pytest.mark.parametrize("draw", [philox.bits, philox.uniform, philox.normal], ids=lambda draw: draw.__name__)
def test_pieces_join_without_a_seam(draw, monkeypatch):
    index = torch.arange(1, 1001)
    whole = draw(index, KEY)
    monkeypatch.setattr(philox, "_ELEMENTS_AT_ONCE", 37)
    assert torch.equal(draw(index, KEY), whole)


def test_uniform_and_normal_follow_from_bits():
    bits = philox.bits(torch.arange(1000), KEY).double()
    uniform = philox.uniform(torch.arange(1000), KEY)
    assert torch.equal(uniform, ((bits / 2**8).floor() / 2**24).float())
    first, second = (bits[0::2] + 1) / 2**32, bits[1::2] / 2**32
    pair = torch.stack([(2 * math.pi * second).cos(), (2 * math.pi * second).sin()], 1)
    expected = (-2 * first.log()).sqrt()[:, None] * pair
    torch.testing.assert_close(philox.normal(torch.arange(1000), KEY), expected.flatten().float(), atol=1e-6, rtol=1e-6)


def test_distributions():
    n = 200_000
    uniform, normal = philox.uniform(torch.arange(n), KEY).double(), philox.normal(torch.arange(n), KEY).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    # Five standard errors of each estimate.
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(normal.mean()) < 5 * n**-0.5
    assert abs(normal.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((normal**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for lag in (1, 2, 3, 4):
        assert abs((normal[lag:] * normal[:-lag]).mean()) < 5 * n**-0.5


def test_bad_arguments():
    with pytest.raises(ValueError, match="int64, got torch"):
        philox.bits(torch.arange(3, dtype=torch.int32), KEY)
    with pytest.raises(ValueError, match="64 bits, got -1"):
        philox.uniform(torch.arange(3), -1)
