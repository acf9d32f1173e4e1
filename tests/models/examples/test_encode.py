"""Examples as tokens: cuts to a length, bad records, the tokenizer of bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.data.examples.encode import Encoded, encode_examples, encode_record, join_example
from weft.models.data.examples.example import MaskedTokens
from weft.models.data.examples.forms import BadExample
from weft.models.data.examples.template import find_template
from weft.models.data.inputs import LeftOut
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer, find_tokenizer

from tests.models.examples.chats import CHATML, CHATS, folder, template, turns

pytestmark = pytest.mark.every_value


def left_out() -> LeftOut:
    return LeftOut(empty=0, skipped=[], bad=0, passed=[])


def test_text_as_bytes() -> None:
    record = {"prompt": "wä ", "completion": "☃"}
    encoded = encode_record(record, "a", task="sft", tokenizer=byte_tokenizer(), template=None)
    (segment,) = join_example(encoded, "a").segments
    assert segment.tokens.dtype == np.int64
    assert segment.learned.dtype == np.bool_
    assert segment.tokens.tolist() == [*"wä ☃".encode(), BYTE_END]
    assert segment.learned.tolist() == [False] * 4 + [True] * 4


def test_messages_as_bytes_by_a_template_file(tmp_path: Path) -> None:
    source = template(CHATML, marked=True).replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "chat.jinja").write_text(source)
    tokenizer = byte_tokenizer()
    found = find_template(tokenizer, tmp_path / "chat.jinja")
    record = {"messages": turns("ä", "☃")}
    encoded = encode_record(record, "a", task="sft", tokenizer=tokenizer, template=found)
    (segment,) = join_example(encoded, "a").segments
    before = [*"<|im_start|>user\nä".encode(), BYTE_END, *b"\n<|im_start|>assistant\n"]
    assert segment.tokens.tolist() == [*before, *"☃".encode(), BYTE_END, *b"\n"]
    assert np.flatnonzero(segment.learned).tolist() == [len(before) + i for i in range(4)]


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "sun", "arguments": {}}}]}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
CALLING = PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
)
OF_PARTS = PLAIN.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")


@pytest.mark.parametrize("task", ["sft", "dpo", "kto"])
@pytest.mark.parametrize(
    ("message", "good", "bad", "error"),
    [
        pytest.param(CALL, CALLING, PLAIN, "has tool_calls in message 2, which bad.jinja leaves out", id="calls"),
        pytest.param(
            {"role": "assistant", "content": [{"type": "text", "text": "sun"}]},
            *(OF_PARTS, PLAIN, "has a list of parts as content of message 2, which bad.jinja writes as a list"),
            id="parts",
        ),
    ],
)
def test_a_message_left_out_by_the_template_is_refused(
    task: Any, message: dict[str, Any], good: str, bad: str, error: str, tmp_path: Path
) -> None:
    """A model would learn to answer a call of tools by nothing, or with the brackets of Python's lists."""
    asked = [{"role": "user", "content": [{"type": "text", "text": "Where?"}] if good == OF_PARTS else "Where?"}]
    wrong = [{"role": "assistant", "content": [{"type": "text", "text": "sea"}] if good == OF_PARTS else "sea"}]
    record = {
        "sft": {"messages": [*asked, message]},
        "dpo": {"prompt": asked, "chosen": [message], "rejected": wrong},
        "kto": {"prompt": asked, "completion": [message], "label": True},
    }[task]
    tokenizer = byte_tokenizer()
    for name, source in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.jinja").write_text(source)
    options = {"task": task, "tokenizer": tokenizer}
    encoded = encode_record(record, "a", template=find_template(tokenizer, tmp_path / "good.jinja"), **options)
    learned = encoded.completions[0].tokens[encoded.completions[0].learned]
    assert tokenizer.decode(learned.tolist()).startswith("sun")
    record = json.loads(json.dumps(record).replace('[{"type": "text", "text": "Where?"}]', '"Where?"'))
    with pytest.raises(BadExample, match=re.escape(error.replace("bad.jinja", str(tmp_path / "bad.jinja")))):
        encode_record(record, "a", template=find_template(tokenizer, tmp_path / "bad.jinja"), **options)


def test_special_tokens_in_a_chat_are_tokens_and_nothing_is_added(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(folder(tmp_path / "tokenizer", "llama"))
    tokens, places = tokenizer.encode_with_places("<|begin|>the sky<|eot|>")
    assert (tokens[0], tokens[-1], tokens.count(0)) == (0, tokenizer.end, 1)
    assert (places[0], places[-1]) == ((0, 9), (16, 23))
    assert tokenizer.end_name == "<|eot|>"


def test_an_example_without_a_token_to_learn_is_refused() -> None:
    # A first token is no target.
    encoded = Encoded(np.zeros(0, dtype=np.int64), (MaskedTokens(np.array([5]), np.array([True])),))
    message = r"a\.jsonl: line 7 has no token to learn behind the first of its 1 tokens; mend the record, or skip bad"
    with pytest.raises(BadExample, match=message):
        join_example(encoded, "a.jsonl: line 7")


def test_the_mismatched_completion_follows_this_prompt() -> None:
    records = [
        {"prompt": "a long prompt", "completion": "b", "label": True},
        {"prompt": "c", "completion": "all", "label": False},
    ]
    first, second = (
        encode_record(each, "a", task="kto", tokenizer=byte_tokenizer(), template=None) for each in records
    )
    example = join_example(first, "a", previous=second.completions[0])
    assert example.segments[1].tokens.tolist() == [*b"a long promptall", BYTE_END]
    assert example.segments[1].learned.tolist() == [False] * 13 + [True] * 4


def test_messages_without_a_template_are_refused_even_where_bad_records_are_left_out() -> None:
    records = [("a.jsonl: line 1", CHATS[0])]
    message = r"a\.jsonl: line 1 has messages, and the tokenizer has no chat template; .* or --data\.template FILE, "
    message += 'or write the records without roles, as text: {"prompt": "...", "completion": "..."}$'
    options: dict[str, Any] = {"task": "sft", "tokenizer": byte_tokenizer(), "template": None, "left_out": left_out()}
    with pytest.raises(ValueError, match=message) as refused:
        list(encode_examples(records, skip_bad=True, **options))
    assert not isinstance(refused.value, BadExample)


def test_bad_records_are_named_or_counted(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(folder(tmp_path / "tokenizer", "llama"))
    refused_role = {"messages": [{"role": "assistant", "content": "a"}]}
    records = [(f"a.jsonl: line {i}", each) for i, each in enumerate([CHATS[0], refused_role, {}, CHATS[1]], 1)]
    options: dict[str, Any] = {"task": "sft", "tokenizer": tokenizer, "template": find_template(tokenizer)}
    message = "a.jsonl: line 2 is refused by the chat template of tokenizer_config.json: a chat begins with a user, not"
    with pytest.raises(BadExample) as refused:
        list(encode_examples(records, left_out=left_out(), **options))
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith("; mend the record, or skip bad records with weft data prepare --skip-bad")
    counts = left_out()
    found = list(encode_examples(records, left_out=counts, skip_bad=True, **options))
    assert [place for place, _ in found] == ["a.jsonl: line 1", "a.jsonl: line 4"]
    assert counts.bad == 2


def test_torch_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from weft.models.data.examples import encode, records\n"
        "from weft.models.data.examples.template import ChatTemplate\n"
        "assert ChatTemplate('a', '{{ 1 }}', ()).render([]) == '1'\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
