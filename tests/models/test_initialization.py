"""Initial values on every mesh are one process's."""

import torch
from torch.distributed.tensor import DTensor
from weft.models.initialization import initialize
from weft.models.llama.model import Llama
from weft.reshard import to_global

from tests.models.cases import SMALL
from tests.models.test_huggingface_parts import MESH, lay_out


def initialize_in_parallel():
    model = lay_out(Llama(SMALL), MESH, None)
    initialize(model, 3)
    return {name: to_global(parameter).detach() for name, parameter in model.named_parameters()}, {
        name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()
    }


def test_initial_values_do_not_depend_on_the_mesh(pool):
    model = Llama(SMALL)
    initialize(model, 3)
    for values, parallel in pool.run(initialize_in_parallel):
        assert all(parallel.values())
        for name, parameter in model.named_parameters():
            assert torch.equal(values[name], parameter.detach())
