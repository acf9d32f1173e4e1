"""Bad input of fine-tuning, typed as a command: one line, status 2, no files, and no weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.end_to_end.test_train import weft_preloaded
from tests.models.examples.chats import turns
from tests.models.tuning.runs import records, save_model, write

CHAT = turns("What?", "It is blue.")
LONG = "It is blue. " * 120  # more tokens than a row has
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "chats": [{"messages": CHAT}] * 3,
    "sft": records("sft", messages=True),
    "dpo": records("dpo", messages=True),
    "kto": records("kto", messages=True),
    "twice": [{"messages": CHAT}, {"messages": [CHAT[0], *CHAT]}],
    "long-prompt": [{"messages": turns(LONG, "It is")}],
    "no-chosen": [*records("dpo", messages=True, count=2), {"prompt": "a", "rejected": "b"}],
    "null-chosen": [{"prompt": "a", "chosen": None, "rejected": "b"}],
    "alike": [{"prompt": "a", "chosen": "b", "rejected": "b"}],
    "alike-after-the-cut": [{"prompt": "a", "chosen": f"{LONG}x", "rejected": f"{LONG}y"}],
    "null-label": [{"prompt": "a", "completion": "b", "label": None}],
    "label": [{"prompt": "a", "completion": "b", "label": "yes"}],
    "user-alone": [{"messages": CHAT[:1]}],
    "no-messages": [{"messages": []}],
    "text-as-messages": [{"messages": "hello"}],
    "null-content": [{"messages": [CHAT[0], {"role": "assistant", "content": None}]}],
    "empty": [],
}
TEMPLATES = {
    "alternate": ALTERNATE,
    "raises": "{{ raise_exception('only models of the year 2031') }}",
    "divides": "{{ 1 / 0 }}",
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "unfinished": "{% for m in messages %}",
}
NO_TEMPLATE = "line 1 has messages, and the tokenizer has no chat template; give"
SFT, DPO, KTO = (f"train --from base --task {task} --output out --data.path" for task in ("sft", "dpo", "kto"))
CASES: dict[str, tuple[str, str]] = {
    # those of the specification
    "no-template": ("train --from plain --task sft --output out --data.path chats.jsonl", NO_TEMPLATE),
    "no-template-of-pairs": ("train --from plain --task dpo --output out --data.path dpo.jsonl", NO_TEMPLATE),
    "no-template-of-judged": ("train --from plain --task kto --output out --data.path kto.jsonl", NO_TEMPLATE),
    "no-template-to-chat": ("generate plain --chat --prompt x", "plain has no chat template (chat_template in"),
    "no-template-to-evaluate": ("evaluate plain --data chats.jsonl", NO_TEMPLATE),
    "roles": (
        f"{SFT} twice.jsonl --data.template alternate.jinja",
        "twice.jsonl: line 2 is refused by alternate.jinja: roles must alternate; mend the record",
    ),
    "cut-away": (f"{SFT} long-prompt.jsonl", "long-prompt.jsonl: line 1 has no token to learn among the first 64 of"),
    "no-chosen": (f"{DPO} no-chosen.jsonl", "line 3 has the fields prompt, rejected, and dpo reads chosen and"),
    "null-chosen": (f"{DPO} null-chosen.jsonl", "the fields prompt, rejected, with null in chosen, and dpo reads"),
    "alike": (f"{DPO} alike.jsonl", "alike.jsonl: line 1 has equal chosen and rejected, which prefer nothing; mend"),
    "targets": (
        f"{SFT} chats.jsonl --lora.rank 2 --lora.targets c_attn", "LoRA target 'c_attn' matches no module of Llama;"
    ),
    "reference": (
        f"{DPO} dpo.jsonl --reference-from other",
        "other has a vocabulary of 400 tokens, and the model one of 326; give the folder of a model with the same",
    ),
    "reference-to-evaluate": (
        "evaluate base --data dpo.jsonl --reference other", "the reference other has a vocabulary of 400 tokens, and"
    ),
    "adapters-of-another-base": (
        "train --from adapters --task sft --output out --data.path chats.jsonl",
        "of shape (2, 32), but one of shape (2, 64): the adapters are of another base model, or damaged",
    ),
    "reference-of-another-base": (
        f"{DPO} dpo.jsonl --reference-from adapters", "(2, 64): the adapters are of another base model, or damaged"
    ),
    "adapters-of-another-base-to-evaluate": ("evaluate adapters --data chats.jsonl", "are of another base model, or"),
    "adapters-of-another-base-to-chat": ("generate adapters --chat --prompt x", "are of another base model, or damag"),
    # further input
    "alike-after-the-cut": (
        f"{DPO} alike-after-the-cut.jsonl", "line 1 has chosen and rejected answers that are equal in their first 64 to"
    ),
    "null-row-of-parquet": (f"{SFT} null.parquet", "null.parquet: row 2 has no fields, and sft reads messages; or con"),
    "null-message-of-parquet": (f"{SFT} null-message.parquet", "row 2 has null as message 1 of 'messages'; a message"),
    "parquet-without-rows": (f"{SFT} no-rows.parquet", "no-rows.parquet holds no example of sft; give records of"),
    "raising-template": (f"{SFT} chats.jsonl --data.template raises.jinja", "raises.jinja: only models of the year 2"),
    "dividing-template": (f"{SFT} chats.jsonl --data.template divides.jinja", "by divides.jinja: division by zero; m"),
    "endless-template": (f"{SFT} chats.jsonl --data.template endless.jinja", "it takes more than 200,000 steps of lo"),
    "unfinished-template": (f"{SFT} chats.jsonl --data.template unfinished.jinja", "unfinished.jinja is no Jinja tem"),
    "empty-file": (f"{SFT} empty.jsonl", "no records of examples are in empty.jsonl; give files of JSONL, JSON, CSV"),
    "adapters-without-config": (
        "train --from bare --task sft --output out --data.path chats.jsonl", "--from bare has no model: no config.json"
    ),
    "adapters-without-base": (
        "train --from orphan --task sft --output out --data.path chats.jsonl", "of the model nowhere, which is not a fo"
    ),
    "missing-reference": (f"{DPO} dpo.jsonl --reference-from nowhere", "nowhere is not a folder; give a Hugging Face"),
    "null-label": (f"{KTO} null-label.jsonl", "the fields prompt, completion, with null in label, and kto reads pro"),
    "label": (f"{KTO} label.jsonl", "label.jsonl: line 1 has the label 'yes'; a label is true or false, or 1 or 0"),
    "user-alone": (f"{SFT} user-alone.jsonl", "line 1 has no message of the role 'assistant' to learn; its roles are"),
    "no-messages": (f"{SFT} no-messages.jsonl", "line 1 has an empty list of messages in its field 'messages'; mend"),
    "text-as-messages": (f"{SFT} text-as-messages.jsonl", "line 1 has text in its field 'messages', not a list of m"),
    "null-content": (f"{SFT} null-content.jsonl", "line 1 has no content in message 2 of 'messages'; mend the record"),
    "pairs-for-sft": (f"{SFT} dpo.jsonl", "and sft reads messages; or conversations; or prompt and completion; or"),
    "no-data": ("train --from base --task sft --output out", "--task sft needs data; give records or a prepared"),
    "option-without-reference": (
        "evaluate base --data dpo.jsonl --dpo.loss ipo", "a loss of dpo needs a reference; give --reference FOLDER"
    ),
    "unprepared": (
        "data prepare null.parquet --task sft --tokenizer base --output out", "null.parquet: row 2 has no fields, and"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders whose weights cannot be read, adapters of a wider base, records and templates."""
    path = tmp_path_factory.mktemp("bad")
    save_model(path / "base", 1)
    save_model(path / "other", 2, vocab_size=400)
    shutil.copytree(path / "base", path / "plain")
    settings = json.loads((path / "plain/tokenizer_config.json").read_text())
    assert settings.pop("chat_template")
    (path / "plain/tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("base", "other", "plain"):
        (path / name / "model.safetensors").write_bytes(b"no weights")
    matrices = {"A": torch.zeros(2, 64), "B": torch.zeros(64, 2)}
    for name, base in (("adapters", str(path / "base")), ("orphan", "nowhere"), ("bare", None)):
        (path / name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(path / "base" / file, path / name)
        layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        tensors = {layer.format(side): each for side, each in matrices.items()}
        save_file(tensors, path / name / "adapter_model.safetensors")
        if base is not None:
            config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
            (path / name / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    for name, rows in ROWS.items():
        write(path / f"{name}.jsonl", rows)
    for name, template in TEMPLATES.items():
        (path / f"{name}.jinja").write_text(template)
    for name, values in (("null", [CHAT, None]), ("null-message", [CHAT, [None, CHAT[1]]]), ("no-rows", [])):
        pq.write_table(pa.table({"messages": pa.array(values, type=MESSAGES)}), path / f"{name}.parquet")
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_reads_no_weights(name: str, folder: Path) -> None:
    """Every folder's weights are damaged: a command that reads weights would say so."""
    command, why = CASES[name]
    sizes = ["--data.sequence-length", "64", "--mesh.dp", "2", "--mesh.tp", "1"] if command.startswith("train") else []
    before = sorted(folder.rglob("*"))
    done = weft_preloaded(*command.split(), *sizes, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"weft {' '.join(command.split()[: 2 if command.startswith('data') else 1])}: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert why in done.stderr
    assert sorted(folder.rglob("*")) == before
