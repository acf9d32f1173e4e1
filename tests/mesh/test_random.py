"""Keys: a function of the seed and the path alone, the same in every process and version."""

import enum
import os
import subprocess
import sys

import pytest
from hypothesis import strategies as st
from weft.mesh import ProcessMesh, derive_key

from tests.support.search import searched

PINNED = [
    pytest.param((0,), 17563181186795651822, id="seed"),
    pytest.param((1,), 4958314404164847208, id="seed-1"),
    pytest.param((0, "layers.3.mlp", 7), 16683970236640058262, id="name-and-step"),
    pytest.param((-5, "", "ä"), 5962975575413799225, id="odd"),
    pytest.param((2**80, 0), 4482722659758629487, id="large"),
]
parts = st.one_of(st.integers(), st.text(st.characters(exclude_categories=["Cs"])))
paths = st.tuples(st.integers(), st.lists(parts, max_size=4))


@pytest.mark.parametrize("path, key", PINNED)
def test_keys_are_pinned(path, key):
    assert derive_key(*path) == key


@pytest.mark.parametrize("seed", ["0", "77"])
def test_a_key_is_the_same_in_every_process(seed):
    made = "from weft.mesh import derive_key; print(derive_key(0, 'layers.3.mlp', 7))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    run = subprocess.run([sys.executable, "-c", made], env=environment, capture_output=True, text=True, check=True)
    assert int(run.stdout) == derive_key(0, "layers.3.mlp", 7)


def test_paddle_62125_meshes_made_before_change_no_key():
    before = derive_key(3, "weight")
    ProcessMesh.grid(pp=2, dp=2).get_mesh_with_dim("dp").rename(dp="data")
    assert derive_key(3, "weight") == before


@searched(paths, paths)
def test_different_paths_have_different_keys(first, second):
    same = (first[0], *first[1]) == (second[0], *second[1])
    key, other = derive_key(first[0], *first[1]), derive_key(second[0], *second[1])
    assert 0 <= key < 2**64
    assert (key == other) == same


@pytest.mark.parametrize(
    "first, second",
    [
        pytest.param(("a", "b"), ("ab",), id="joined"),
        pytest.param(("a/b",), ("a", "b"), id="separator"),
        pytest.param((1, 2), (12,), id="digits"),
        pytest.param(("1",), (1,), id="text-of-an-int"),
        pytest.param(("a/str:1:b",), ("a", "b"), id="encoding-in-a-name"),
        pytest.param(("",), (), id="empty-name"),
    ],
)
def test_paths_that_read_alike_are_told_apart(first, second):
    assert derive_key(0, *first) != derive_key(0, *second)


def test_a_subclass_of_int_or_str_counts_as_its_value():
    class Step(enum.IntEnum):
        FIRST = 1

    class Name(str):
        pass

    assert derive_key(0, Step.FIRST, Name("a")) == derive_key(0, 1, "a")


@pytest.mark.parametrize("part", [1.0, None, True, b"a", ("a",)])
def test_other_types_are_refused(part):
    with pytest.raises(ValueError, match="derived from names and ints, not from"):
        derive_key(0, part)
    with pytest.raises(ValueError, match="derived from names and ints, not from"):
        derive_key(part)
