"""Forms of records: the dialogs of each, and records in no form, refused by what is wrong."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from weft.models.data.examples.example import Task
from weft.models.data.examples.forms import BadExample, read_form

from tests.models.examples.chats import turns

pytestmark = pytest.mark.every_value

CHAT = turns("a", "b")
A, B, C = CHAT[:1], CHAT[1:], turns("a", "c")[1:]


def dialogs(record: dict[str, Any], task: Task, *, has_template: bool = True) -> list[tuple[Any, Any]]:
    def plain(side: Any) -> Any:
        return side if side is None or isinstance(side, str) else list(side)

    form = read_form(record, task, has_template=has_template)
    return [(plain(each.prompt), plain(each.completion)) for each in form.dialogs]


@pytest.mark.parametrize(
    ("task", "record", "expected"),
    [
        pytest.param("sft", {"messages": CHAT, "prompt": "x"}, [(None, CHAT)], id="messages"),
        pytest.param(
            "sft",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]},
            [(None, [A[0], {**B[0], "weight": 1}])],
            id="sharegpt",
        ),
        pytest.param("sft", {"conversations": CHAT}, [(None, CHAT)], id="conversations-with-roles"),
        pytest.param("sft", {"prompt": "a", "completion": "b"}, [("a", "b")], id="text"),
        pytest.param("sft", {"prompt": "", "completion": "b"}, [("", "b")], id="text-without-prompt"),
        pytest.param("sft", {"prompt": A, "completion": B}, [(A, B)], id="prompted-messages"),
        pytest.param("sft", {"instruction": "a", "input": "", "output": "b"}, [(A, B)], id="instruction"),
        pytest.param(
            "sft",
            {"instruction": "a", "input": "c", "output": "b"},
            [([{"role": "user", "content": "a\n\nc"}], B)],
            id="instruction-with-input",
        ),
        pytest.param(
            "dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, [("a", "b"), ("a", "c")], id="pair-of-text"
        ),
        pytest.param("dpo", {"prompt": A, "chosen": B, "rejected": C}, [(A, B), (A, C)], id="pair"),
        pytest.param("dpo", {"chosen": A + B, "rejected": A + C}, [(A, B), (A, C)], id="pair-without-prompt"),
        pytest.param("dpo", {"prompt": "a", "chosen": A + B, "rejected": A + C}, [(A, B), (A, C)], id="text-repeated"),
        pytest.param(
            "dpo", {"prompt": None, "chosen": "to b", "rejected": "to c"}, [("to", " b"), ("to", " c")], id="texts"
        ),
        pytest.param("kto", {"prompt": A, "completion": B, "label": 1}, [(A, B)], id="judged"),
    ],
)
def test_dialogs_of_each_form(task: Task, record: dict[str, Any], expected: list[Any]) -> None:
    assert dialogs(record, task) == expected


def test_an_instruction_without_a_template_is_text() -> None:
    record = {"instruction": "a", "input": "c", "output": "b"}
    assert dialogs(record, "sft", has_template=False) == [("a\n\nc\n\n", "b")]


def test_fields_for_the_template_come_along() -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": None}}]}
    record = {"messages": [*A, call], "tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}}
    (dialog,) = read_form(record, "sft", has_template=True).dialogs
    assert (list(dialog.completion), dialog.tools) == ([*A, call], [{"name": "f"}])
    assert dialog.variables == {"enable_thinking": False}


@pytest.mark.parametrize(("label", "expected"), [(True, True), (False, False), (1, True), (0, False)])
def test_labels(label: Any, expected: bool) -> None:
    assert read_form({"prompt": "a", "completion": "b", "label": label}, "kto", has_template=False).label is expected


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        pytest.param("sft", {}, "has no fields, and sft reads messages; or conversations; or prompt and", id="empty"),
        pytest.param("sft", {"text": "a"}, "has the fields text, and sft reads messages", id="text-alone"),
        pytest.param("sft", {"chosen": 1, "rejected": 2}, "(its fields fit --task dpo)", id="other-task"),
        pytest.param(
            "dpo", {"prompt": "a", "rejected": "b"}, "and dpo reads chosen and rejected, with", id="no-chosen"
        ),
        pytest.param("sft", {"messages": "a"}, "has text in its field 'messages', not a list", id="text"),
        pytest.param("sft", {"messages": []}, "has an empty list of messages in its field 'messages'", id="no-message"),
        pytest.param("sft", {"messages": None}, "has no fields, with null in messages, and sft reads", id="null"),
        pytest.param("sft", {"messages": [1]}, "has int 1 as message 1 of 'messages'", id="number"),
        pytest.param("sft", {"messages": [{"content": "a"}]}, "has no role in message 1 of 'messages'", id="no-role"),
        pytest.param("sft", {"messages": [{"role": 1, "content": "a"}]}, "has no role in message 1", id="role-number"),
        pytest.param("sft", {"messages": [*A, {"role": "assistant"}]}, "no content in message 2", id="no-content"),
        pytest.param(
            "sft", {"messages": [{"role": "user", "content": 1}]}, "has int 1 as content", id="content-number"
        ),
        pytest.param(
            "sft",
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, *CHAT[1:]]},
            "has a part of the type 'image' in the content of message 1 of 'messages'",
            id="image",
        ),
        pytest.param(
            "sft", {"messages": A}, "no message of the role 'assistant' to learn; its roles are user", id="user"
        ),
        pytest.param("sft", {"prompt": "a", "completion": ""}, "has an empty completion", id="empty-completion"),
        pytest.param("sft", {"prompt": A, "completion": []}, "has an empty list of messages", id="empty-list"),
        pytest.param(
            "sft",
            {"prompt": A, "completion": [{"role": "assistant", "content": ""}]},
            "has an empty completion",
            id="empty-message",
        ),
        pytest.param(
            "sft", {"prompt": A, "completion": "b"}, "has messages in prompt and text in completion", id="mixed"
        ),
        pytest.param("sft", {"prompt": A, "completion": A}, "begins with a message of 'user', not of 'as", id="users"),
        pytest.param("sft", {"instruction": "a", "output": ""}, "no text in its field 'output'", id="no-output"),
        pytest.param(
            "sft", {"instruction": "a", "input": 1, "output": "b"}, "in its field 'input', but int 1", id="input"
        ),
        pytest.param(
            "dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "has equal chosen and rejected", id="equal"
        ),
        pytest.param("dpo", {"prompt": "a", "chosen": "b", "rejected": ""}, "has an empty rejected", id="no-rejected"),
        pytest.param("dpo", {"chosen": "ab", "rejected": "a"}, "an empty rejected behind the beginning", id="prefix"),
        pytest.param("dpo", {"chosen": B, "rejected": C}, "share no beginning; give the field prompt", id="no-prompt"),
        pytest.param("dpo", {"chosen": B, "rejected": "c"}, "messages in chosen and text in rejected", id="mixed-pair"),
        pytest.param(
            "kto", {"prompt": "a", "completion": "b", "label": "true"}, "the label 'true'; a label is", id="label"
        ),
        pytest.param("kto", {"prompt": "a", "completion": "b", "label": 2}, "has the label 2", id="label-2"),
        pytest.param(
            "kto",
            {"prompt": "a", "completion": "b", "label": None},
            "and kto reads prompt, completion and",
            id="label-null",
        ),
        pytest.param("kto", {"prompt": "a", "completion": "b", "label": 1.0}, "has the label 1.0", id="label-float"),
        pytest.param(
            "sft", {"prompt": "\ud83d", "completion": "b"}, "half a surrogate pair in its field 'pr", id="half"
        ),
        pytest.param(
            "sft",
            {"messages": [*CHAT, {"role": "user", "x": float("nan")}]},
            "that is not JSON: Out of range",
            id="nan",
        ),
        pytest.param(
            "sft",
            {"messages": [*CHAT, {"role": "user", "x": datetime.date(2026, 7, 6)}]},
            "not JSON: Object of",
            id="date",
        ),
        pytest.param("sft", {"messages": CHAT, "tools": "["}, "text in its field 'tools' that is not JSON", id="tools"),
        pytest.param("sft", {"messages": CHAT, "tools": [1]}, "tools are a list of objects", id="tools-number"),
        pytest.param("sft", {"messages": CHAT, "chat_template_kwargs": 1}, "give an object", id="variables"),
        pytest.param(
            "sft",
            {"messages": CHAT, "chat_template_kwargs": {"messages": []}},
            "sets 'messages' in chat",
            id="reserved",
        ),
    ],
)
def test_records_in_no_form_are_refused(task: Task, record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadExample) as refused:
        read_form(record, task, has_template=True)
    assert message in str(refused.value)


def test_values_nested_deeply_are_refused() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadExample, match="nests too deeply in its field 'messages'"):
        read_form({"messages": [*CHAT, {"role": "user", "x": nested}]}, "sft", has_template=True)


def test_a_field_of_null_is_as_good_as_absent() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": None}
    with pytest.raises(BadExample, match="has no content in message 2 of 'messages'"):
        read_form({"messages": [{"role": "user", "content": "q"}, called]}, "sft", has_template=True)
    messages = [{"role": "user", "content": "q", "name": None}, called | {"tool_calls": [{"name": "f"}]}]
    (dialog,) = read_form({"messages": messages}, "sft", has_template=True).dialogs
    assert dialog.completion == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    )
    union = {"messages": None, "prompt": "a", "completion": "b"}  # a row of Parquet with the columns of two forms
    (dialog,) = read_form(union, "sft", has_template=True).dialogs
    assert (dialog.prompt, dialog.completion) == ("a", "b")
