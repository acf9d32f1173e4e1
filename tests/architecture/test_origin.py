"""Lessons that Paddle and PaddleNLP published and left open: each has a test named after its source."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.architecture.rules import ROOT

pytestmark = pytest.mark.every_value

# The requirements, and how the names of their tests, of parameter ids and of classes begin.
ROWS = {
    "Paddle 62125: a sub-mesh along any axis in one call": ["test_paddle_62125_get_mesh_with_dim", "TestPaddle62125"],
    "Paddle 62125: nothing that is random follows the ids or the order of meshes": [
        "test_paddle_62125_meshes_made_before_change_no_key",
        "test_paddle_62125_initial_weights",
        "test_paddle_62125_order",
    ],
    "Paddle 58126: ranks outside a mesh know all and do nothing": [
        "test_paddle_58126_a_rank_outside",
        "test_paddle_58126_ranks_outside",
        "test_paddle_58126_stages",
        "paddle-58126-outside",
    ],
    "Paddle 59057: gradients are synchronized by one mechanism": ["test_paddle_59057"],
    "PaddleNLP 9412: networks for one device": [
        "test_paddlenlp_9412_a_models_files_know_no_processes",
        "test_paddlenlp_9412_no_layer_has_a_parallel_argument",
    ],
    "PaddleNLP 9412: parallelize by wildcard names": ["test_paddlenlp_9412_wildcard"],
    "PaddleNLP 9412: pipelines, and what is beside their layers": [
        "test_paddlenlp_9412_stages_have_the_loss",
        "test_paddlenlp_9412_what_is_beside_the_layers",
    ],
    "PaddleNLP 9412: sharding levels": ["test_paddlenlp_9412_sharding_levels"],
    "PaddleNLP 9412: sequence parallel is derived": ["test_paddlenlp_9412_sequence_parallel_is_derived"],
    "PaddleNLP 9412: shared weights are found by identity": ["test_paddlenlp_9412_shared_weights"],
    "PaddleNLP 9412: a model contains models": ["test_paddlenlp_9412_a_model_that_contains_models"],
    "PaddleNLP 9412: LoRA": ["test_paddlenlp_9412_lora"],
    "PaddleNLP 9412: DPO and KTO": [
        "test_paddlenlp_9412_a_policy_and_its_frozen_reference",
        "test_paddlenlp_9412_a_folder_learns_conversations_then_preferences",
    ],
    "PaddleNLP 9412: a user's autograd function": ["test_paddlenlp_9412_a_users_autograd_function"],
    "PaddleNLP 9412: an odd vocabulary": ["test_paddlenlp_9412_no_split_of_an_odd_vocabulary"],
    "PaddleNLP 9412: one checkpoint format": ["test_paddlenlp_9412_checkpoints", "test_paddlenlp_9412_a_rank_reads"],
    "PaddleNLP 9412: generate": ["test_paddlenlp_9412_a_parallel_model_generates"],
    "PaddleNLP 9412: one training command": [
        "test_paddlenlp_9412_training",
        "test_paddlenlp_9412_a_folder_learns_conversations_then_preferences",
    ],
    "PaddleNLP 9412: versions": ["test_paddlenlp_9412_versions"],
    "PaddleNLP 9412: the data loader": ["test_anchor_32_paddlenlp_9412_data"],
    "PaddleNLP 9412: recomputation": [
        "test_paddlenlp_9412_recompute",
        "test_paddlenlp_9412_loss_and_gradients_of_one_process_with_recomputation",
    ],
}


@functools.cache
def names() -> frozenset[str]:
    """Names of test functions and classes, and of parameter ids that name a source; of all files that name a source."""
    found = set()
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for text in (text for text in texts if "paddle" in text.lower()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and str(node.value).startswith("paddle"):
                found.add(str(node.value))
    return frozenset(found)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_tests_named_after_it(row: str) -> None:
    lacking = [start for start in ROWS[row] if not any(name.startswith(start) for name in names())]
    assert not lacking


def test_a_test_that_names_a_row_is_in_the_table() -> None:
    named = {name for name in names() if name.startswith(("test_paddlenlp_9412", "test_paddle_6", "test_paddle_5"))}
    starts = tuple(start for row in ROWS.values() for start in row)
    assert not {name for name in named if not name.startswith(starts)}
