"""Every family against transformers: each option alone and in pairs, saved by either and read by the other."""

import pytest

from tests.models.folders import alone, check_agreement, pairs


def test_each_option(portion, tmp_path):
    for kind, names in portion.of(alone(), every=3):
        check_agreement(kind, names, tmp_path / f"{kind}-{names[0]}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_each_option_in_several_files_with_other_weights(seed, tmp_path):
    for kind, names in alone():
        check_agreement(kind, names, tmp_path / f"{kind}-{names[0]}", seed=seed, sharded=True)


def test_pairs_of_options(portion, tmp_path):
    for kind, names in portion.of(pairs(), every=100):
        check_agreement(kind, names, tmp_path / kind / "-".join(names), sharded=len(names[0]) % 2 == 0)
