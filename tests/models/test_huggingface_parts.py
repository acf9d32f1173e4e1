"""Hugging Face folders on a mesh: each rank reads its parts, and together the ranks write a folder."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models.checkpoint import huggingface
from weft.models.checkpoint.huggingface import from_pretrained, save_pretrained
from weft.models.checkpoint.tensors import read_slices
from weft.models.generation import generate
from weft.models.llama.model import PLAN
from weft.reshard import distribute, layout_of, to_global
from weft.reshard.moving.dtensor import wrap

from tests.models.cases import SMALL, make, some_tokens
from tests.models.test_huggingface import CLOSE


def test_each_rank_reads_its_slice_alone(tmp_path):
    """Reading the slices of a layout's ranks one by one gives the whole tensor's; also uneven and empty slices."""
    model = make(SMALL)
    save_pretrained(model, tmp_path / "model")
    weight = model.embed_tokens.weight.detach()  # 61 rows
    mesh = ProcessMesh.grid(tp=8, dp=2)
    with safe_open(tmp_path / "model/model.safetensors", framework="pt") as file:
        stored = file.get_slice("model.embed_tokens.weight")
        for layout in (Layout(mesh, {"tp": Shard(0)}), Layout(mesh, {"tp": Shard(0), "dp": Shard(1)})):
            for rank in (*mesh.ranks, 16):
                part = layout.local_slices(weight.shape, rank)
                assert torch.equal(read_slices(stored, part), weight[part])


MESH = ProcessMesh.grid(dp=2, tp=2)


def lay_out(model, mesh, plan):
    """Make parameters DTensors on their device: rows over tp, except for one over both axes and one over none."""
    made = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            if old not in made:
                by_axis = {32: {"tp": Shard(0)}, 44: {"tp": Shard(0), "dp": Shard(0)}}.get(
                    old.shape[0], {"tp": Shard(0)}
                )
                layout = Layout(mesh, {} if name == "bias" else by_axis)
                part = old.detach()[layout.local_slices(old.shape, torch.distributed.get_rank())].clone()
                made[old] = torch.nn.Parameter(wrap(part, layout, old.shape))
            setattr(module, name, made[old])
    return model


def read_and_save_in_parallel(folder):
    """The parts this rank read, by name, with their layouts; whether the tie held; and a save."""
    with patch.object(huggingface, "parallelize", lay_out):
        model = from_pretrained(folder, MESH)
    parts = {name: (p.to_local().detach(), layout_of(p)) for name, p in model.named_parameters()}
    save_pretrained(model, folder / "again", shard_bytes=20_000)
    try:
        save_pretrained(model, folder / "again")
    except ValueError as error:
        return parts, model.lm_head.weight is model.embed_tokens.weight, str(error)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_parallel_model_is_read_by_parts_and_saved_whole(pool, tmp_path, tied):
    model = make(replace(SMALL, tie_embeddings=tied))
    save_pretrained(model, tmp_path / "model")
    for rank, (parts, still_tied, refusal) in enumerate(pool.run(read_and_save_in_parallel, tmp_path / "model")):
        for name, parameter in model.named_parameters():
            part, layout = parts[name]
            assert torch.equal(part, parameter.detach()[layout.local_slices(parameter.shape, rank)])
        assert still_tied == tied
        assert "again exists" in refusal  # rank 0's error, on every rank
    again = from_pretrained(tmp_path / "model/again")
    assert torch.equal(again(some_tokens(SMALL)), model(some_tokens(SMALL)))


def run_in_parallel(folder, sequence):
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = from_pretrained(folder, mesh, replace(PLAN, sequence=True) if sequence else None)
    tokens = some_tokens(SMALL, 2, 6)
    with torch.no_grad():
        logits = to_global(model(distribute(tokens, Layout(mesh, {"dp": Shard(0)}))))
    generated = generate(model, tokens[:, :1], max_new_tokens=4)
    save_pretrained(model, folder / f"again-{sequence}")
    return logits, generated


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence", [False, True], ids=["whole-tokens", "sequence-parallel"])
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_a_folder_under_a_plan_gives_the_same_logits_and_tokens(pool, tmp_path, options, sequence):
    model, tokens = make(replace(SMALL, **options)), some_tokens(SMALL, 2, 6)
    save_pretrained(model, tmp_path / "model")
    for logits, generated in pool.run(run_in_parallel, tmp_path / "model", sequence):
        torch.testing.assert_close(logits, model(tokens).detach(), **CLOSE)
        assert torch.equal(generated, generate(model, tokens[:, :1], max_new_tokens=4))  # odd lengths too
    again = from_pretrained(tmp_path / f"model/again-{sequence}")
    assert torch.equal(again(tokens), model(tokens))


def fail_to_save(folder):
    model = lay_out(make(SMALL), MESH, None)

    def full(*arguments, **options):
        raise OSError("no space left")

    with patch.object(huggingface, "write_with_checksums", full), pytest.raises(OSError, match="no space left"):
        save_pretrained(model, folder / "model", shard_bytes=10_000)


def test_a_failed_save_is_told_on_every_rank(pool, tmp_path):
    pool.run(fail_to_save, tmp_path)
    assert not any(tmp_path.iterdir())
