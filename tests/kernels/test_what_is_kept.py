"""A finished op keeps no tensor alive, neither operands nor results, on any path."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.kernels.test_second_derivatives import OPS


@pytest.mark.parametrize("path", ["reference", "interpreted"])
@pytest.mark.parametrize("name", OPS)
def test_no_tensor_outlives_its_user(name: str, path: str, request: pytest.FixtureRequest) -> None:
    if path == "interpreted":
        request.getfixturevalue("interpreted")
    run, tensors = OPS[name]
    operands = [each.float().requires_grad_() if each.is_floating_point() else each.clone() for each in tensors]
    output = run(*operands)
    gradients = torch.autograd.grad(output.sum(), [each for each in operands if each.requires_grad])
    alive = [weakref.ref(each) for each in (*operands, output, *gradients)]
    del operands, output, gradients
    gc.collect()
    left = [each() for each in alive]
    assert not [each.shape for each in left if each is not None]
