"""Folders of adapters with their base: read, generated from, begun from, resumed, and read by peft."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    Llama,
    PipelinePlan,
    forward_backward,
    from_pretrained,
    generate,
    load_checkpoint,
    lora,
    merge_lora,
    parallelize,
    save_checkpoint,
    save_lora,
    save_pretrained,
)
from weft.models.checkpoint.configs import config_of
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.manifest import Manifest
from weft.models.cli import main
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.train.from_folder import find_origin
from weft.models.train.initial_weights import load_unsharded_weights, load_weights

from tests.models.cases import whole
from tests.models.test_lora import ALPHA, CONFIG, RANK, TARGETS, make, stirred

BYTES = replace(CONFIG, vocab_size=257)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def adapted() -> nn.Module:
    return stirred(lora(make(BYTES), RANK, ALPHA, TARGETS))


def save_folders(folder: Path, *, checkpoint: bool = False) -> nn.Module:
    """Saves a base with tokenizer and chat template, and adapters; returns the model with its adapters."""
    save_pretrained(make(BYTES), folder / "base", tokenizer=byte_tokenizer())
    (folder / "base/chat_template.jinja").write_text("{{ messages }}")
    (folder / "base/generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    if checkpoint:
        (folder / "base").rename(folder / "hf")
        save_checkpoint(from_pretrained(folder / "hf"), folder / "base")
    model = adapted()
    save_lora(model, folder / "adapters", base=str(folder / "base"))
    return model


def status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


def tokens() -> Tensor:
    return torch.randint(0, 257, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoint", [False, True], ids=["folder", "checkpoint"])
def test_a_folder_of_adapters_is_read_with_its_base(checkpoint: bool, tmp_path: Path, capsys: Any) -> None:
    model = save_folders(tmp_path, checkpoint=checkpoint)
    read = from_pretrained(tmp_path / "adapters")
    assert torch.equal(read(tokens()), model(tokens()))
    assert [name for name, each in read.named_parameters() if each.requires_grad] == [
        name for name, each in model.named_parameters() if each.requires_grad
    ]
    half = from_pretrained(tmp_path / "adapters", dtype=torch.bfloat16)
    dtypes = {each.dtype for name, each in half.named_parameters() if ".lora." in name}
    assert dtypes == {torch.float32}
    assert config_of(tmp_path / "adapters") == BYTES
    assert find_origin(tmp_path / "adapters") == tmp_path / "adapters"
    files = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files <= {path.name for path in (tmp_path / "adapters").iterdir()}
    convert(tmp_path / "adapters", tmp_path / "merged")
    assert torch.equal(from_pretrained(tmp_path / "merged")(tokens()), merge_lora(model)(tokens()))
    arguments = ["--prompt", "abc", "--tokens", "8", "--temperature", "0"]
    printed = []
    for folder in ("adapters", "merged"):
        assert status(["generate", str(tmp_path / folder), *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    (tmp_path / "run").mkdir()
    (tmp_path / "adapters").rename(tmp_path / "run/checkpoint")
    assert status(["generate", str(tmp_path / "run"), *arguments]) == 0
    assert capsys.readouterr().out == printed[0]
    assert find_origin(tmp_path / "run") == tmp_path / "run/checkpoint"


def test_peft_and_transformers_generate_the_same_tokens(tmp_path: Path) -> None:
    import peft
    import transformers

    save_folders(tmp_path)
    prompt = torch.tensor([list(b"The ")])
    expected = generate(from_pretrained(tmp_path / "adapters").eval(), prompt, max_new_tokens=12, ends=[256])
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}
    assert theirs.generate(input_ids=prompt, **options).tolist() == expected.tolist()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert theirs.generate(input_ids=prompt, **options).tolist() == expected.tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapters")
    assert tokenizer.chat_template == "{{ messages }}"


def damaged_config(folder: Path) -> None:
    (folder / "adapters/adapter_config.json").write_text("{")


def base_with_other_tokens(folder: Path) -> None:
    shutil.rmtree(folder / "base")
    save_pretrained(make(CONFIG), folder / "base")


def base_of_another_shape(folder: Path) -> None:
    shutil.rmtree(folder / "base")
    save_pretrained(make(replace(BYTES, intermediate_size=40)), folder / "base")


def base_without_layers(folder: Path) -> None:
    shutil.rmtree(folder / "base")
    save_pretrained(make(replace(BYTES, num_layers=1)), folder / "base")


def base_unnamed(folder: Path) -> None:
    file = folder / "adapters/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))


def base_of_adapters(folder: Path) -> None:
    shutil.rmtree(folder / "base")
    shutil.copytree(folder / "adapters", folder / "base")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda f: shutil.rmtree(f / "base"), "base, which is not a folder here; fetch or save", id="gone"),
        pytest.param(damaged_config, "adapter_config.json is not JSON", id="config"),
        pytest.param(base_with_other_tokens, "has 31 tokens, but the tokenizer of the adapters in", id="vocabulary"),
        pytest.param(base_of_another_shape, "the adapters are of another base model", id="shape"),
        pytest.param(base_without_layers, "for which Llama has no layer; check it", id="layers"),
        pytest.param(base_unnamed, "base_model_name_or_path is None, and names no model", id="unnamed"),
        pytest.param(base_of_adapters, "which itself holds adapters alone", id="adapters"),
    ],
)
def test_a_bad_base_is_a_line_and_status_2(damage: Any, said: str, tmp_path: Path, capsys: Any) -> None:
    save_folders(tmp_path)
    damage(tmp_path)
    assert status(["generate", str(tmp_path / "adapters"), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert error.strip().count("\n") == 0


PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp": ({"pp": 2}, {"pipeline": PipelinePlan(microbatches=2)}),
}


def begun(origin: Path, case: str | None) -> dict[str, Tensor]:
    """A run's model: adapters before parallelize, then the weights of the folder."""
    with torch.device("meta"):
        model = lora(Llama(BYTES), 2, 4, ["*_proj"])
    device = torch.device("cpu")
    if case is None:
        return dict(load_unsharded_weights(model, origin, device, seed=9).named_parameters())
    axes, changes = PLANS[case]
    mesh, plan = ProcessMesh.grid(**axes), replace(model.parallel_plan(), **changes)
    load_weights(parallelize(model, mesh, plan), origin, device, mesh, plan, seed=9)
    return {name: whole(each) for name, each in model.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize("origin", ["base", "checkpoint", "adapters", "adapted-checkpoint"])
def test_a_run_begins_with_a_folder_and_adapters_of_its_own(origin: str, case: str, tmp_path: Path, pool: Any) -> None:
    """The folder's adapters are folded into its weights; the run's are drawn from the seed."""
    model = save_folders(tmp_path)
    save_checkpoint(make(BYTES), tmp_path / "checkpoint")
    save_checkpoint(model, tmp_path / "adapted-checkpoint")
    base = merge_lora(model) if "adapt" in origin else make(BYTES)
    expected = dict(lora(base, 2, 4, ["*_proj"], seed=9).named_parameters())
    alone = begun(tmp_path / origin, None)
    assert alone.keys() == expected.keys()
    found_names: set[str] = set()
    for found in (alone, *pool.run(begun, tmp_path / origin, case, ranks=math.prod(PLANS[case][0].values()))):
        for name, each in found.items():
            torch.testing.assert_close(each, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        found_names |= found.keys()
    assert found_names == expected.keys()


def trained(folder: Path, axes: dict[str, int], changes: dict[str, Any], steps: range, load: str, save: str) -> Any:
    """Steps of AdamW on the adapters; a checkpoint read before them, and one written after."""
    model = stirred(lora(make(BYTES), RANK, ALPHA, TARGETS, dropout=0.1))
    if axes:
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **changes))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, foreach=False)
    if load:
        load_checkpoint(model, folder / load, optimizer)
    for number in steps:
        rows = torch.randint(0, 257, (4, 10), generator=torch.Generator().manual_seed(number))
        inputs = {"dropout_key": torch.tensor(number, dtype=torch.uint64)}
        forward_backward(model, cross_entropy, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), **inputs)
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model, folder / save, optimizer)
    return {name: whole(each).detach() for name, each in model.named_parameters()}


@pytest.mark.exhaustive
def test_a_run_with_adapters_is_resumed_with_the_same_bits_and_on_another_mesh(tmp_path: Path, pool: Any) -> None:
    axes: dict[str, int] = {"dp": 2}
    straight = pool.run(trained, tmp_path, axes, {}, range(4), "", "straight", ranks=2)[0]
    pool.run(trained, tmp_path, axes, {}, range(2), "", "half", ranks=2)
    resumed = pool.run(trained, tmp_path, axes, {}, range(2, 4), "half", "resumed", ranks=2)[0]
    assert all(torch.equal(resumed[name], each) for name, each in straight.items())
    state = [name for name in load_names(tmp_path / "half") if name.startswith("optimizer.")]
    assert state
    assert all(".lora." in name for name in state)
    half = dict(from_pretrained(tmp_path / "half").named_parameters())
    for found in pool.run(trained, tmp_path, {"tp": 2}, {}, range(2, 2), "half", "other", ranks=2):
        assert all(torch.equal(found[name], each) for name, each in half.items())
    there = pool.run(trained, tmp_path, {"tp": 2}, {"sequence": True}, range(2, 4), "half", "tp", ranks=2)[0]
    for name, each in straight.items():
        torch.testing.assert_close(there[name], each, rtol=1e-4, atol=1e-5, msg=name)
    convert(tmp_path / "half", tmp_path / "merged")
    merged = merge_lora(from_pretrained(tmp_path / "half"))
    assert torch.equal(from_pretrained(tmp_path / "merged")(tokens()), merged(tokens()))


def load_names(folder: Path) -> list[str]:
    return list(Manifest.read(folder).tensors)
