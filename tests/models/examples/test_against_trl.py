"""Tokens and masks of examples are those of trl's trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.models.data.examples.encode import encode_record, join_example
from weft.models.data.examples.example import Example, MaskedTokens, Task
from weft.models.data.examples.template import find_template
from weft.models.data.tokenizer import find_tokenizer

from tests.models.examples.chats import CHATS, PROMPTED, TEXTS, folder, turns

pytestmark = pytest.mark.every_value

LENGTH = 1 << 20
KINDS = [
    pytest.param("chatml", True, id="chatml"),
    pytest.param("llama", True, id="llama"),
    pytest.param("chatml", False, id="chatml-without-marks"),
    pytest.param("llama", False, id="llama-without-marks"),
]
Rows = list[tuple[list[int], list[bool]]]


# trl and datasets take two seconds to import: only a process that runs these tests imports them.


@pytest.fixture(autouse=True)
def caches_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield


def ours(path: Path, records: list[dict[str, Any]], task: Task) -> list[Example]:
    """The examples of records; of kto with the completion of the record before."""
    tokenizer = find_tokenizer(path)
    template = find_template(tokenizer)
    encoded = [encode_record(each, "a", task=task, tokenizer=tokenizer, template=template) for each in records]
    previous = [each.completions[0] for each in encoded]
    return [
        join_example(each, "a", previous=previous[i - 1] if task == "kto" else None) for i, each in enumerate(encoded)
    ]


def row(segment: MaskedTokens) -> tuple[list[int], list[bool]]:
    return segment.tokens.tolist(), segment.learned.tolist()


def sft(path: Path, records: list[dict[str, Any]], mask: str) -> Rows:
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    arguments = SimpleNamespace(
        dataset_num_proc=None,
        max_length=None,
        dataset_text_field="text",
        assistant_only_loss=mask == "assistant_masks",
        use_liger_kernel=False,
    )
    rows = SFTTrainer._prepare_dataset(
        SimpleNamespace(_is_vlm=False),
        datasets.Dataset.from_list(records),
        AutoTokenizer.from_pretrained(path),
        arguments,
        packing=False,
        formatting_func=None,
        dataset_name="train",
    )
    return [(each["input_ids"], [bool(learned) for learned in each[mask]]) for each in rows]


@pytest.mark.parametrize("kind", ["chatml", "llama"])
def test_conversations_under_templates_with_marks(kind: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", kind)
    tools = [{"name": "sun", "parameters": {"type": "object"}}]
    records = [*CHATS, {**CHATS[0], "tools": tools}]
    expected = [sft(path, [each], "assistant_masks")[0] for each in records]
    assert [row(each.segments[0]) for each in ours(path, records, "sft")] == expected


@pytest.mark.parametrize("kind", ["chatml", "llama"])
def test_conversations_under_templates_without_marks(kind: str, tmp_path: Path) -> None:
    """The tokens are trl's. trl would learn them all, the user's included, or refuse to learn the assistant's alone."""
    path = folder(tmp_path / "tokenizer", kind, marked=False)
    marked = folder(tmp_path / "marked", kind)
    with pytest.raises(RuntimeError, match="at least one example has no assistant"):
        sft(path, CHATS, "assistant_masks")
    for example, (tokens, learned) in zip(ours(path, CHATS, "sft"), sft(marked, CHATS, "assistant_masks"), strict=True):
        assert example.segments[0].tokens.tolist() == tokens
        found = example.segments[0].learned.tolist()
        if kind == "llama":
            assert found == learned
        else:  # the prefix includes the newline after the marked words
            newlines = [i for i, (a, b) in enumerate(zip(found, learned, strict=True)) if a != b]
            assert len(newlines) == sum(learned[i] and not learned[i + 1] for i in range(len(learned) - 1))
            assert all(found[i] and learned[i - 1] for i in newlines)


@pytest.mark.parametrize(("kind", "marked"), KINDS)
@pytest.mark.parametrize("records", [pytest.param(TEXTS, id="text"), pytest.param(PROMPTED, id="messages")])
def test_prompts_with_completions(records: list[dict[str, Any]], kind: str, marked: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", kind, marked=marked)
    expected = sft(path, records, "completion_mask")
    assert [row(each.segments[0]) for each in ours(path, records, "sft")] == expected


def test_a_token_across_prompt_and_completion_is_learned(tmp_path: Path) -> None:
    """trl counts the prompt's tokens, which here are more than the whole has, and only warns."""
    path = folder(tmp_path / "tokenizer", "plain")
    record = {"prompt": "What color is ", "completion": "the sky?"}
    tokens, learned = row(ours(path, [record], "sft")[0].segments[0])
    trl_tokens, trl_learned = sft(path, [record], "completion_mask")[0]
    assert tokens == trl_tokens
    across = learned.index(True)
    assert find_tokenizer(path).decode([tokens[across]]) == " the"
    assert not trl_learned[across]


def dpo(path: Path, records: list[dict[str, Any]]) -> list[list[tuple[list[int], list[bool]]]]:
    from transformers import AutoTokenizer
    from trl import DPOTrainer
    from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

    tokenizer, found = AutoTokenizer.from_pretrained(path), []
    for record in records:
        texts = maybe_apply_chat_template(maybe_extract_prompt(record), tokenizer)
        each = DPOTrainer.tokenize_row(texts, tokenizer, add_special_tokens=False)
        prompt = each["prompt_input_ids"]
        sides = (each["chosen_input_ids"], each["rejected_input_ids"])
        found.append([(prompt + side, [False] * len(prompt) + [True] * len(side)) for side in sides])
    return found


def pairs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of a prompt and a completion, as pairs with the completion of another."""
    others = [each["completion"] for each in [*records[1:], records[0]]]
    return [
        {"prompt": each["prompt"], "chosen": each["completion"], "rejected": other}
        for each, other in zip(records, others, strict=True)
    ]


@pytest.mark.parametrize(("kind", "marked"), KINDS)
def test_pairs_of_messages(kind: str, marked: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", kind, marked=marked)
    explicit = pairs(PROMPTED)
    implicit = [{name: each["prompt"] + each[name] for name in ("chosen", "rejected")} for each in explicit]
    repeated = [{"prompt": "the sky?", **each} for each in implicit]
    expected = dpo(path, explicit)
    for records in (explicit, implicit, repeated):
        assert dpo(path, records) == expected
        assert [list(map(row, each.segments)) for each in ours(path, records, "dpo")] == expected


def test_pairs_of_text(tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", "plain")
    records = [*pairs(TEXTS), {"chosen": "the sky is blue", "rejected": "the sky is in the sea"}]
    assert [list(map(row, each.segments)) for each in ours(path, records, "dpo")] == dpo(path, records)


def test_pairs_of_text_begin_as_prompts_do(tmp_path: Path) -> None:
    """trl leaves out the BOS that the tokenizer puts before prompts."""
    path = folder(tmp_path / "tokenizer", "llama")
    expected = [[([0, *tokens], [False, *learned]) for tokens, learned in each] for each in dpo(path, pairs(TEXTS))]
    assert [list(map(row, each.segments)) for each in ours(path, pairs(TEXTS), "dpo")] == expected


def kto(path: Path, records: list[dict[str, Any]]) -> tuple[Rows, Rows]:
    """Own and mismatched rows, as KTOTrainer prepares them, with all records in one batch."""
    from transformers import AutoTokenizer
    from trl.data_utils import maybe_apply_chat_template
    from trl.trainer.kto_trainer import _get_kl_dataset, _process_tokens, _tokenize

    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [maybe_apply_chat_template(each, tokenizer) for each in records]
    batch = {name: [each[name] for each in texts] for name in ("prompt", "completion", "label")}
    tokens = {name: [list(each) for each in rows] for name, rows in _tokenize(batch, tokenizer).items()}
    matched = {**batch, **tokens}
    mismatched = _get_kl_dataset({name: list(value) for name, value in matched.items()})
    settings = {
        "is_encoder_decoder": False,
        "tokenizer": tokenizer,
        "max_length": LENGTH,
        "truncation_mode": "keep_end",
        "label_pad_token_id": -100,
        "max_prompt_length": LENGTH,
    }
    found: list[Rows] = []
    for data, prefix in ((matched, ""), (mismatched, "KL_")):
        rows = [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
        done = [_process_tokens(each, prefix=prefix, **settings) for each in rows]
        found.append(
            [
                (each[f"{prefix}completion_input_ids"], [label != -100 for label in each[f"{prefix}completion_labels"]])
                for each in done
            ]
        )
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "marked"), KINDS)
@pytest.mark.parametrize("records", [pytest.param(TEXTS, id="text"), pytest.param(PROMPTED, id="messages")])
def test_judged_completions(records: list[dict[str, Any]], kind: str, marked: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", kind, marked=marked)
    judged = [{**each, "label": bool(i % 2)} for i, each in enumerate(records)]
    own, mismatched = kto(path, judged)
    examples = ours(path, judged, "kto")
    assert [row(each.segments[0]) for each in examples] == own
    assert [row(each.segments[1]) for each in examples] == mismatched
    assert [each.label for each in examples] == [False, True, False]


def test_a_judged_token_across_prompt_and_completion_is_learned_as_trl_does(tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", "plain")
    judged = [{"prompt": "What color is ", "completion": "the sky?", "label": 1}, {**TEXTS[0], "label": 0}]
    own, mismatched = kto(path, judged)
    examples = ours(path, judged, "kto")
    assert [row(each.segments[0]) for each in examples] == own
    assert [row(each.segments[1]) for each in examples] == mismatched


def test_templates_that_end_prompts_otherwise_than_wholes_continue(tmp_path: Path) -> None:
    """As DeepSeek's, whose generation prompt begins a reasoning: the prompt is what both begin with."""
    path = folder(tmp_path / "tokenizer", "chatml", marked=False)
    config = path / "tokenizer_config.json"
    config.write_text(
        config.read_text().replace("<|im_start|>assistant\\\\n'", "<|im_start|>assistant\\\\n<think>\\\\n'")
    )
    assert "<think>" in config.read_text()
    records = pairs(PROMPTED)
    assert [list(map(row, each.segments)) for each in ours(path, records, "dpo")] == dpo(path, records)
    with pytest.raises(ValueError, match="is no beginning of the whole text"):
        ours(path, PROMPTED, "sft")


def test_several_turns_of_a_completion_learn_the_assistants_alone(tmp_path: Path) -> None:
    """trl learns the user's words in such a completion."""
    path = folder(tmp_path / "tokenizer", "chatml")
    messages = turns("the sky?", "the sea", "Where?", "In the sun.")
    record = {"prompt": messages[:1], "completion": messages[1:]}
    tokenizer = find_tokenizer(path)
    for task in ("sft", "kto"):
        segment = ours(path, [{**record, "label": True}], task)[0].segments[0]  # type: ignore[arg-type]
        learned = tokenizer.decode(segment.tokens[segment.learned].tolist())
        end = "<|im_end|>" if task == "kto" else ""
        assert learned == f"the sea<|im_end|>\nIn the sun.<|im_end|>\n{end}"
    pair = {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:2]}
    chosen = ours(path, [pair], "dpo")[0].segments[0]
    assert tokenizer.decode(chosen.tokens[chosen.learned].tolist()) == (
        "the sea<|im_end|>\nIn the sun.<|im_end|>\n<|im_end|>"
    )
