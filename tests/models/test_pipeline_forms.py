"""The form of a message between stages, told as JSON: nothing that is told can run."""

from __future__ import annotations

import ast
import json
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, ProcessMesh
from weft.models.parallel.pipeline.messages import Channel, decode_form, encode_form, form_of
from weft.reshard import distribute

from tests.architecture.rules import ROOT

Pair = namedtuple("Pair", "one other")
X = torch.ones(2, 3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(X, id="tensor"),
        pytest.param(X.float().requires_grad_(), id="with-gradient"),
        pytest.param(torch.ones(0, 3, dtype=torch.int64), id="empty"),
        pytest.param(torch.ones((), dtype=torch.complex64), id="scalar"),
        pytest.param((X, [None, True, 1, 2.5, float("inf"), "text"], ()), id="tuple"),
        pytest.param({"hidden": X, 3: {"more": (X, X)}, None: []}, id="dict"),
        pytest.param(OrderedDict(b=X, a=1), id="ordered"),
        pytest.param({"tuple": 1, "Sent": [1]}, id="names-of-its-own"),
        pytest.param(2**70, id="large"),
    ],
)
def test_the_form_of_a_message_is_read_as_written(message: Any) -> None:
    form = form_of(message)
    told = encode_form(form)
    assert decode_form(told) == form and type(decode_form(told)) is type(form)
    json.loads(told)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        pytest.param(Pair(1, X), "Pair", id="named-tuple"),
        pytest.param(defaultdict(list, a=1), "defaultdict", id="default-dict"),
        pytest.param({"a": [slice(1, 2)]}, "slice", id="slice"),
        pytest.param(b"bytes", "bytes", id="bytes"),
        pytest.param(torch.float32, "dtype", id="dtype"),
        pytest.param({1, 2}, "set", id="set"),
    ],
)
def test_a_message_without_a_form_in_json_is_refused(message: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"a {kind} cannot be sent to the next stage; use tensors, numbers, text"):
        encode_form(form_of(message))


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(pickle.dumps((1, 2)), id="pickle"),
        pytest.param(b"{}", id="empty"),
        pytest.param(b"[1]", id="list-without-a-name"),
        pytest.param(b'{"set": [1]}', id="container"),
        pytest.param(b'{"Sent": [[1], "save", false, [1], null]}', id="no-dtype"),
        pytest.param(b'{"Sent": [[1], "nothing", false, [1], null]}', id="no-name"),
        pytest.param(b'{"Sent": [["x"], "float32", false, [1], null]}', id="no-size"),
        pytest.param(b'{"Sent": [[1], "float32", false]}', id="cut-off"),
        pytest.param(b'{"tuple": 1}', id="no-items"),
    ],
)
def test_bytes_that_are_no_form_are_refused(told: bytes) -> None:
    with pytest.raises(ValueError, match="is not the form of a message between stages"):
        decode_form(told)


def handed_over(message: Any) -> Any:
    """Sends a message with DTensors, and a message that a channel cannot describe."""
    here, cpu = dist.get_rank(), torch.device("cpu")
    mesh = ProcessMesh([here], ["dp"])
    channel = Channel("of a test", (0, 1), here, mesh, cpu, {})
    if here == 1:
        return channel.receive("alike", more=False)
    laid = distribute(torch.arange(6.0).reshape(2, 3), Layout(mesh, "dp: S(0)"))
    described = {"laid": laid, "plain": (torch.arange(3), 5), "text": "x"}
    channel.check(described, "alike")
    channel.send(described, "alike")
    channel.finish()
    with pytest.raises(RuntimeError, match=r"pipeline of a test: .* a Pair cannot be sent to the next stage"):
        channel.check(message, "other")
    return None


def test_a_message_arrives_as_it_was(pool: Any) -> None:
    _, received = pool.run(handed_over, Pair(1, 2), ranks=2)
    assert list(received) == ["laid", "plain", "text"] and received["text"] == "x"
    assert torch.equal(received["plain"][0], torch.arange(3)) and received["plain"][1] == 5
    assert torch.equal(received["laid"].to_local(), torch.arange(6.0).reshape(2, 3))


def test_nothing_of_the_pipelines_is_unpickled() -> None:
    folder = ROOT / "packages/models/src/weft/models/parallel"
    imported = {
        name.name
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert "torch" in imported and not imported & {"pickle", "marshal", "shelve", "dill"}
