"""Hugging Face folders: what transformers writes is read, and what is written transformers reads."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models.checkpoint import huggingface
from weft.models.checkpoint.huggingface import from_pretrained, save_pretrained
from weft.models.generation import generate
from weft.models.llama.plan import PLAN
from weft.models.llama.weights import read_config
from weft.reshard import distribute, layout_of, to_global
from weft.reshard.running.dtensor import wrap

from tests.models.cases import SCALING, SMALL, each_variant, make, some_tokens

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def their_config(**options):
    import transformers  # here, as worker processes load this module too and have no use for it

    return transformers.LlamaConfig(
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **options,
        }
    )


def their_folder(folder, max_shard_size="5GB", dtype=torch.float32, **options):
    """A random Llama of transformers, saved; with its biases and norms random too."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(their_config(**options)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="grouped"),
        pytest.param({"num_key_value_heads": None}, id="as-many-kv-heads"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"rope_scaling": LLAMA3, "rope_theta": 500000.0}, id="llama3-scaling"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"head_dim": 12, "rms_norm_eps": 1e-5}, id="wide-heads"),
        pytest.param({"max_shard_size": "20KB"}, id="several-files"),
        pytest.param({"max_shard_size": "20KB", "tie_word_embeddings": True}, id="several-files-tied"),
    ],
)
def test_reads_what_transformers_writes(tmp_path, options):
    other = their_folder(tmp_path / "model", **options)
    assert (tmp_path / "model" / huggingface.INDEX_FILE).exists() == ("max_shard_size" in options)
    model = from_pretrained(tmp_path / "model")
    tokens = some_tokens(SMALL)
    torch.testing.assert_close(model(tokens), other(tokens).logits, **CLOSE)
    assert (model.lm_head.weight is model.embed_tokens.weight) == bool(options.get("tie_word_embeddings"))
    assert all(parameter.requires_grad for parameter in model.parameters())


@each_variant()
@pytest.mark.parametrize("shard_bytes", [huggingface.SHARD_BYTES, 10_000], ids=["one-file", "several-files"])
def test_transformers_reads_what_is_written(tmp_path, config, shard_bytes):
    import transformers

    model, tokens = make(config), some_tokens(config)
    save_pretrained(model, tmp_path / "new" / "model", shard_bytes=shard_bytes)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]  # nothing else is left
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "model", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(other(tokens).logits, model(tokens), **CLOSE)

    again = from_pretrained(tmp_path / "new" / "model")
    assert again.config == config
    assert torch.equal(again(tokens), model(tokens))


def test_files_hold_at_most_shard_bytes(tmp_path):
    model = make(SMALL)
    save_pretrained(model, tmp_path / "model", shard_bytes=10_000)
    sizes = [
        [t.numel() * t.element_size() for t in load_file(path).values()]
        for path in (tmp_path / "model").glob("*.safetensors")
    ]
    assert len(sizes) > 2
    assert all(sum(size) <= 10_000 or len(size) == 1 for size in sizes)


def test_dtype_is_as_stored_or_as_asked(tmp_path):
    import transformers

    their_folder(tmp_path / "model", dtype=torch.bfloat16)
    model = from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    wide = from_pretrained(tmp_path / "model", dtype=torch.float32)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(wide(some_tokens(SMALL)), other(some_tokens(SMALL)).logits, **CLOSE)
    save_pretrained(model, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_theta": 5e5, "rope_scaling": LLAMA3}, id="transformers-4"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}, id="with-the-older-key"),
        pytest.param({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, id="transformers-5"),
    ],
)
def test_rotary_settings_under_old_and_new_keys(rope):
    config = read_config({**their_config().to_dict(), "rope_theta": None, "rope_scaling": None, **rope})
    assert (config.rope_theta, config.rope_scaling) == (5e5, SCALING)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {}}], ids=str)
def test_no_rotary_scaling(rope):
    given = {name: value for name, value in their_config().to_dict().items() if not name.startswith("rope")}
    config = read_config({**given, **rope})
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


def test_tensors_of_old_files_that_no_one_needs_are_passed_over(tmp_path):
    their_folder(tmp_path / "model", tie_word_embeddings=True)
    change_tensors(
        tmp_path / "model", **{"lm_head.weight": torch.zeros(61, 32), "model.rotary_emb.inv_freq": torch.zeros(4)}
    )
    assert from_pretrained(tmp_path / "model").lm_head.weight.any()


# What cannot be read


def change_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def no_index_map(folder):
    (folder / "model.safetensors").unlink()
    (folder / huggingface.INDEX_FILE).write_text("{}")


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / huggingface.INDEX_FILE).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda f: f.rename(f.with_name("other")), "is not a folder; give one", id="no-folder"),
        pytest.param(lambda f: (f / "config.json").unlink(), "has no config.json; give a folder", id="no-config"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "is not JSON", id="config-not-json"),
        pytest.param(lambda f: (f / "config.json").write_text("[]"), "holds a list, not an object", id="config-a-list"),
        pytest.param(
            lambda f: change_config(f, model_type="bert"), "'bert' is not supported; use one of llama", id="type"
        ),
        pytest.param(lambda f: change_config(f, model_type=...), "model_type 'None'", id="no-type"),
        pytest.param(lambda f: change_config(f, hidden_size=...), "has no 'hidden_size'", id="no-hidden-size"),
        pytest.param(lambda f: change_config(f, hidden_act="gelu"), "hidden_act 'gelu' is not supported", id="act"),
        pytest.param(
            lambda f: change_config(f, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
            "rope type 'longrope' is not supported; use one of default, linear, dynamic, llama3, yarn",
            id="rope-type",
        ),
        pytest.param(
            lambda f: change_config(f, rope_scaling={"rope_type": "llama3", "factor": 2.0}),
            "has no low_freq_factor, high_freq_factor, original_max_position_embeddings",
            id="rope-incomplete",
        ),
        pytest.param(lambda f: change_config(f, partial_rotary_factor=0.5), "partial_rotary_factor 0.5", id="partial"),
        pytest.param(lambda f: change_config(f, quantization_config={"bits": 4}), "quantized", id="quantized"),
        pytest.param(lambda f: change_config(f, num_attention_heads=3), "num_heads 3 is not a multiple", id="heads"),
        pytest.param(
            lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor", id="no-weights"
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors file", id="corrupt"
        ),
        pytest.param(no_index_map, "has no weight_map", id="index-without-map"),
        pytest.param(missing_shard, "has no model-00001-of-00002.safetensors, which", id="missing-file"),
        pytest.param(
            lambda f: change_tensors(f, **{"model.norm.weight": None}), "lacks model.norm.weight;", id="missing-tensor"
        ),
        pytest.param(
            lambda f: change_config(f, num_hidden_layers=3),
            r"lacks model.layers.2.input_layernorm.weight, .* and 6 more tensors",
            id="missing-layer",
        ),
        pytest.param(
            lambda f: change_config(f, num_hidden_layers=1), "which config.json's model does not have", id="unexpected"
        ),
        pytest.param(
            lambda f: change_config(f, intermediate_size=45),
            r"mlp.gate_proj.weight has shape \(44, 32\), but config.json makes it \(45, 32\)",
            id="shape",
        ),
        pytest.param(
            lambda f: change_tensors(f, **{"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight is I8; save it as one of",
            id="dtype",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_why(tmp_path, spoil, message):
    their_folder(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "model")


def test_more_ranks_than_heads_are_refused_before_a_weight_is_read(tmp_path):
    save_pretrained(make(SMALL), tmp_path / "model")
    with (
        patch.object(huggingface, "_read", side_effect=AssertionError),
        pytest.raises(
            ValueError, match=r"q_proj has 4 heads of 8, .* over 'tp' of size 8 .*; sizes that work: 1, 2, 4"
        ),
    ):
        from_pretrained(tmp_path / "model", ProcessMesh.grid(tp=8))


# What cannot be written


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="model exists; give another folder"):
        save_pretrained(make(SMALL), tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model"]


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="a Linear has no Hugging Face form; save one of llama"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(huggingface, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(make(SMALL), tmp_path / "model")
    assert not any(tmp_path.iterdir())


# Parts


def test_each_rank_reads_its_slice_alone(tmp_path):
    """The slices that ranks of a layout hold, read one by one, are those of the whole tensor; uneven and empty too."""
    model = make(SMALL)
    save_pretrained(model, tmp_path / "model")
    weight = model.embed_tokens.weight.detach()  # 61 rows
    mesh = ProcessMesh.grid(tp=8, dp=2)
    with huggingface.safe_open(tmp_path / "model/model.safetensors", framework="pt") as file:
        stored = file.get_slice("model.embed_tokens.weight")
        for layout in (Layout(mesh, {"tp": Shard(0)}), Layout(mesh, {"tp": Shard(0), "dp": Shard(1)})):
            for rank in (*mesh.ranks, 16):
                part = layout.local_slices(weight.shape, rank)
                assert torch.equal(huggingface._read(stored, part), weight[part])


MESH = ProcessMesh.grid(dp=2, tp=2)


def lay_out(model, mesh, plan):
    """Parameters as DTensors on the device they are on: rows over tp, but for one over both axes and one over none."""
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

    with patch.object(huggingface, "save_file", full), pytest.raises(OSError, match="no space left"):
        save_pretrained(model, folder / "model", shard_bytes=10_000)


def test_a_failed_save_is_told_on_every_rank(pool, tmp_path):
    pool.run(fail_to_save, tmp_path)
    assert not any(tmp_path.iterdir())
