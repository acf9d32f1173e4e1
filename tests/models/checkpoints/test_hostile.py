"""Hostile model folders, checkpoints and adapters: claims are checked against contents, and no file outside is read."""

import hashlib
import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.models import Llama, from_pretrained, load_lora, lora, save_lora
from weft.models.checkpoint.convert import convert, copy_folder
from weft.models.cli import main
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.terminal import one_line

from .strangers import CONFIG, NORM, change_config, change_manifest, write_folders


@pytest.fixture
def folder(tmp_path):
    return write_folders(tmp_path)


# Names and links leading out of a folder


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "{}/other/model.safetensors", "..", "a/b.safetensors", "", ".x"]
)
def test_an_index_names_files_of_its_folder(folder, name):
    (folder / "other").mkdir()
    (folder / "model/model.safetensors").rename(folder / "other/model.safetensors")
    names = load_file(folder / "other/model.safetensors")
    index = {"weight_map": dict.fromkeys(names, name.format(folder))}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a plain name within the folder is needed"):
        convert(folder / "model", folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("value", [1.5, None, {"a": 1}, ["x"], True])
def test_an_index_of_other_types_is_refused(folder, value):
    (folder / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: value}}))
    with pytest.raises(ValueError, match=r"weight_map\.model\.norm\.weight is .*, and a string is needed"):
        from_pretrained(folder / "model")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "merges.txt", "tokenizer.model", "vocab.json"]
)
@pytest.mark.parametrize("content", ["a private text", '{"token": "private"}'], ids=["text", "json"])
def test_a_link_out_of_a_folder_is_left_out_and_named(folder, name, content):
    (folder / "private").write_text(content)
    (folder / "model" / name).unlink(missing_ok=True)
    (folder / "model" / name).symlink_to("../private")
    with pytest.warns(UserWarning, match=f"{name} is a link out of its folder and is left out"):
        assert name in convert(folder / "model", folder / "out")
    assert not any("private" in path.read_text(errors="replace") for path in (folder / "out").iterdir())


@pytest.mark.exhaustive
def test_weights_that_are_a_link_out_of_a_folder_are_read_and_named(folder):
    (folder / "elsewhere").mkdir()
    weights = folder / "elsewhere/model.safetensors"
    (folder / "model/model.safetensors").rename(weights)
    (folder / "model/model.safetensors").symlink_to("../elsewhere/model.safetensors")
    with pytest.warns(UserWarning, match=f"is a link out of its folder: the weights in {weights.resolve()} are read"):
        convert(folder / "model", folder / "out")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["text", "[1]", "[" * 100_000, '{"a": '], ids=["text", "list", "deep", "cut"])
def test_a_file_that_is_no_json_is_not_copied(folder, name, content):
    (folder / "model" / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} (is not JSON|holds a list|nests too deeply)"):
        convert(folder / "model", folder / "out")
    assert not (folder / "out").exists()


def test_the_links_of_a_cache_are_followed(folder):
    """The layout of huggingface_hub's cache: snapshots/REVISION/NAME is a link to blobs/HASH."""
    snapshot = folder / "cache/snapshots/0123"
    snapshot.mkdir(parents=True)
    (folder / "cache/blobs").mkdir()
    for number, path in enumerate(sorted((folder / "model").iterdir())):
        path.rename(folder / f"cache/blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (folder / "linked").symlink_to(snapshot)
    for source in (snapshot, folder / "linked"):
        convert(source, folder / f"out-of-{source.name}")
        assert (folder / f"out-of-{source.name}/tokenizer.json").read_bytes() == dict(byte_tokenizer().files)[
            "tokenizer.json"
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["link", "pipe", "folder"])
def test_a_runs_model_is_copied_of_plain_files(folder, place):
    path = folder / "model/notes"
    (folder / "private").write_text("private")
    {"link": lambda: path.symlink_to("../private"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[place]()
    with pytest.raises(ValueError, match="notes is no plain file of its folder"):
        copy_folder(folder / "model", folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("door", ["convert", "from_pretrained", "adapters"])
@pytest.mark.parametrize("place", ["pipe", "folder", "link-to-a-device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_plain_files_are_opened(folder, name, place, door):
    if door == "adapters":
        save_lora(lora(Llama(CONFIG), 2, 4.0, ["layers.*.self_attn.q_proj"]), folder / "adapters")
    home = folder / ("adapters" if door == "adapters" else "model")
    path = home / (f"adapter_{name}" if door == "adapters" else name)
    path.unlink()
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "link-to-a-device": lambda: path.symlink_to("/dev/zero")}[
        place
    ]()
    with pytest.raises(ValueError, match=r"no plain file|has neither"):
        if door == "convert":
            convert(home, folder / "out")
        elif door == "from_pretrained":
            from_pretrained(home)
        else:
            load_lora(Llama(CONFIG), home)


# Fields and sizes


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 0, "true or false"),
        ("tie_word_embeddings", [], "true or false"),
        ("attention_bias", "no", "true or false"),
        ("vocab_size", "257", "a whole number"),
        ("hidden_size", 16.0, "a whole number"),
        ("num_hidden_layers", True, "a whole number"),
        ("rms_norm_eps", "1e-6", "a number"),
        ("rope_theta", "10000", "a number"),
        ("rope_theta", True, "a number"),
        ("attention_dropout", False, "a number"),
        ("partial_rotary_factor", True, "a number"),
        ("rope_interleaved", "false", "true or false"),
        ("eos_token_id", "2", "a whole number"),
        ("eos_token_id", [2, "3"], "a whole number"),
        ("bos_token_id", 1.5, "a whole number"),
        ("rms_norm_eps", 10**400, "a number"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(folder, field, value, kind):
    change_config(folder / "model", **{field: value})
    with pytest.raises(ValueError, match=rf"config\.json: {field}.* is .*and {kind}"):
        from_pretrained(folder / "model")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": ["linear"], "factor": 2.0}, "rope_type is a list of 1, and a string"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2', and a number is needed"),
        ({"rope_type": "linear", "factor": True}, "factor is true, and a number is needed"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "false"}, "truncate is 'false', and true or false is needed"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}, "mscale is '1', and a number"),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": -99.0, "mscale_all_dim": 1},
            "mscale or mscale_all_dim that is no number >= 0",
        ),
        ({"rope_type": "linear", "factor": {"a": 1}}, "factor is an object, and a number is needed"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "linear", "factor": 10**400}, "factor is a number of many digits"),
    ],
)
def test_a_rotary_setting_of_another_type_is_refused(folder, name, settings, message):
    change_config(folder / "model", **{name: settings})
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder / "model")


@pytest.mark.few(1)
@pytest.mark.parametrize("door", ["convert", "from_pretrained", "checkpoint"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_layers is 1,000,000,000; it may be 100,000 at most"),
        ({"num_hidden_layers": 200_000}, "num_layers is 200,000; it may be 100,000 at most"),
        ({"num_hidden_layers": 90_000}, "says 90,000 layers, and the files hold 21 tensors"),
        ({"num_hidden_layers": 2**70}, "num_layers is .* at most"),
        ({"vocab_size": 2**62}, "vocab_size is .* at most"),
        ({"hidden_size": 2**70}, "hidden_size is .* at most"),
        ({"vocab_size": 2**39}, r"vocab_size \* hidden_size is .* at most"),
        ({"intermediate_size": 2**38}, r"hidden_size \* intermediate_size is .* at most"),
        ({"head_dim": 2**38}, r"hidden_size \* num_heads \* head_dim is .* at most"),
        ({"num_attention_heads": 2**40, "head_dim": 8}, "num_heads is .* at most"),
        ({"max_position_embeddings": 2**62}, "max_seq_len is .* at most"),
    ],
)
def test_sizes_beyond_the_files_are_refused_in_a_moment(folder, door, fields, message):
    home = folder / ("checkpoint" if door == "checkpoint" else "model")
    change_config(home, **fields)
    if door == "checkpoint":
        content = (home / "config.json").read_bytes()
        said = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        change_manifest(home, lambda holds: holds["files"].update({"config.json": said}))
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        convert(home, folder / "out") if door == "convert" else from_pretrained(home)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_window_layers": -1}, "max_window_layers is -1"),
        ({"max_window_layers": True}, "max_window_layers is True"),
        ({"max_window_layers": 0, "num_hidden_layers": 10**9}, "num_layers is 1,000,000,000"),
        ({"use_sliding_window": "false"}, "use_sliding_window is 'false', and true or false"),
        ({"sliding_window": "4"}, "sliding_window is '4', and a whole number"),
        ({"layer_types": [["sliding_attention"], 3]}, "layer_types has 2 layers, some of"),
    ],
)
def test_windows_of_another_type_are_refused(fields, message):
    from weft.models.qwen.weights import read_config

    whole = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    whole |= {"num_attention_heads": 2, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4}
    assert read_config({**whole, "max_window_layers": 1}).sliding_layers == (1,)
    with pytest.raises(ValueError, match=message):
        read_config({**whole, **fields})


# Adapters


@pytest.mark.exhaustive
def test_adapters_of_another_rank_take_no_memory(folder):
    save_lora(lora(Llama(CONFIG), 2, 4.0, ["layers.*.self_attn.q_proj"]), folder / "adapters")
    path = folder / "adapters/adapter_config.json"
    whole = json.loads(path.read_text())
    for rank in (3, 10**9, 2**70):
        path.write_text(json.dumps({**whole, "r": rank}))
        with pytest.raises(ValueError, match=r"has no lora\.A of layers\.\d\.self_attn\.q_proj of shape"):
            load_lora(Llama(CONFIG), folder / "adapters")
    for field, value in (("lora_alpha", float("nan")), ("lora_alpha", 10**400), ("r", "2"), ("rank_pattern", [])):
        path.write_text(json.dumps({**whole, field: value}))
        with pytest.raises(ValueError, match=field):
            load_lora(Llama(CONFIG), folder / "adapters")


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2), torch.zeros(2, 16, dtype=torch.int64), torch.zeros(0, 16), torch.zeros(2, 2, 4)],
    ids=["vector", "whole-numbers", "empty", "three-dims"],
)
def test_an_adapter_that_is_no_matrix_is_refused(folder, other):
    save_lora(lora(Llama(CONFIG), 2, 4.0, ["layers.*.self_attn.q_proj"]), folder / "adapters")
    path = folder / "adapters/adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {next(iter(sorted(tensors))): other}, path)
    with pytest.raises(ValueError, match="it must be a matrix of F64, F32"):
        load_lora(Llama(CONFIG), folder / "adapters")


# Names in a terminal


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "\u202ebackwards", "bell\x07\x9b2J"])
@pytest.mark.parametrize("place", ["tensor", "field", "file"])
def test_an_error_is_one_printable_line(folder, capfd, name, place):
    if place == "tensor":
        path = folder / "model/model.safetensors"
        save_file(load_file(path) | {name: torch.zeros(1)}, path)
    elif place == "field":
        change_config(folder / "model", **{name: 1})
    else:
        (folder / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: f"{name}.x"}}))
        (folder / "model/model.safetensors").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(folder / "model"), str(folder / "out")])
    said = capfd.readouterr().err
    assert said.endswith("\n") and said[:-1].isprintable()


def test_one_line_keeps_what_is_shown():
    assert one_line("as it is: é, 中, “x”") == "as it is: é, 中, “x”"
    assert one_line("a\nb\r\nc\td\x1b\u2028e") == "a b c\ufffdd\ufffd e"


def test_an_error_of_the_file_format_is_one_line(folder):
    """Some of the safetensors library's errors quote the file and span several lines."""
    header = json.dumps({NORM: {"dtype": "\x1b[31m\n", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "model/checksums.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="is not a safetensors file") as raised:
        from_pretrained(folder / "model")
    assert str(raised.value).isprintable()
