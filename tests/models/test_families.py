"""Every family against transformers: each option alone and in pairs, saved by either and read by the other."""

import itertools

import pytest

from tests.models.folders import CLASSES, alone, check_agreement, drawn, pairs
from tests.support.sample import number_of


@pytest.mark.exhaustive
def test_each_option(portion, tmp_path):
    for kind, names in portion.of(alone(), every=3):
        check_agreement(kind, names, tmp_path / f"{kind}-{names[0]}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_each_option_in_several_files_with_other_weights(seed, tmp_path):
    for kind, names in alone():
        check_agreement(kind, names, tmp_path / f"{kind}-{names[0]}", seed=seed, sharded=True)


@pytest.mark.exhaustive
def test_pairs_of_options(portion, tmp_path):
    for kind, names in portion.of(pairs(), every=100):
        folder, number = tmp_path / kind / "-".join(names), number_of(names)
        check_agreement(kind, names, folder, seed=number % 5, sharded=number % 2 == 0)


@pytest.mark.exhaustive
def test_random_configs(portion, tmp_path):
    for kind, number in portion.of(itertools.product(CLASSES, range(24)), every=24):
        names, sizes = drawn(kind, number)
        check_agreement(kind, names, tmp_path / f"{kind}-{number}", seed=number, **sizes)
