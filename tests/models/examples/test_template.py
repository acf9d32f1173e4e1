"""Chat templates: texts equal to those of transformers; spans to learn; templates that are wrong or hostile."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from weft.models.data.examples.forms import BadExample
from weft.models.data.examples.template import ChatTemplate, find_template
from weft.models.data.tokenizer import byte_tokenizer, find_tokenizer

from tests.models.examples.chats import CHATML, CHATS, LLAMA, folder, template, turns

pytestmark = pytest.mark.every_value

TOOLS = [{"name": "sün", "parameters": {"type": "object", "of": ["<a>", 1, None]}}]


def named(source: str) -> ChatTemplate:
    return ChatTemplate("chat.jinja", source, (("bos_token", "<s>"),))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(template(CHATML, marked=True), id="chatml"),
        pytest.param(template(LLAMA, marked=True), id="llama"),
        pytest.param(
            "{% for m in messages %}\n  {% if loop.first %}{{ m.content }}\n  {% endif %}\n{% endfor %}", id="trim"
        ),
        pytest.param(
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", id="break"
        ),
        pytest.param("{{ tools | tojson(indent=2) }}{{ documents }}{{ add_generation_prompt }}", id="tojson"),
        pytest.param("{{ bos_token ~ eos_token ~ pad_token ~ unk_token }}{{ additional_special_tokens }}", id="tokens"),
        pytest.param(
            "{% macro say(m) %}[{{ m.role }}: {{ m.content ~ '!' ~ loop }}]{% endmacro %}"
            "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
            "{{ say(m) * 2 }}{{ loop.length }}{{ loop.last }}{% endfor %}{{ ns.n }}{{ 'a%sb' % 3 }}{{ 2 ** 5 }}",
            id="macros",
        ),
        pytest.param("{{ messages[::-1] | map(attribute='content') | join(', ') }}{{ range(3) | list }}", id="filters"),
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_texts_are_those_of_transformers(source: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", "llama")
    config = json.loads((path / "tokenizer_config.json").read_text())
    more = {"chat_template": source, "additional_special_tokens": ["<|start|>", "<|end|>"]}
    (path / "tokenizer_config.json").write_text(json.dumps(config | more))
    found = find_template(find_tokenizer(path))
    assert found is not None
    theirs = AutoTokenizer.from_pretrained(path)
    for chat in CHATS:
        options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": add_generation_prompt}
        expected = theirs.apply_chat_template(chat["messages"], tokenize=False, **options)
        assert found.render(chat["messages"], **options) == expected
        assert pickle.loads(pickle.dumps(found)).render(chat["messages"], **options) == expected


def test_the_variables_of_a_record() -> None:
    assert named("{{ thinking }}{{ bos_token }}").render([], variables={"thinking": 1, "bos_token": "b"}) == "1b"


def test_the_date_is_one_for_all_texts() -> None:
    dated = ChatTemplate("a", "{{ strftime_now('%d %b %Y') }}", (), None, datetime(2026, 7, 6))
    assert dated.render([]) == "06 Jul 2026"


def test_named_templates(tmp_path: Path) -> None:
    path = folder(tmp_path / "tokenizer", "plain")
    config = json.loads((path / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    found = find_template(find_tokenizer(path))
    assert found is not None
    assert (found.render([]), found.render([], tools=TOOLS)) == ("d", "1")
    templates[0]["name"] = "other"
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    with pytest.raises(ValueError, match=r"templates other, tool_use, and none is named default; give one"):
        find_template(find_tokenizer(path))


def test_a_file_counts_before_the_tokenizers_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("from the file {{ eos_token }}")
    assert find_template(byte_tokenizer()) is None
    for tokenizer in (byte_tokenizer(), find_tokenizer(folder(tmp_path / "tokenizer", "plain"))):
        found = find_template(tokenizer, tmp_path / "chat.jinja")
        assert found is not None
        assert found.render([]) == "from the file <|endoftext|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"a\n{% for %}", r"chat\.jinja is no Jinja template: line 2: ", id="syntax"),
        pytest.param(b"{{ " + b"(" * 20_000, r"chat\.jinja is no Jinja template: it nests too deeply", id="deep"),
        pytest.param(b"\xff", r"chat\.jinja is not UTF-8 text \(byte 0 of the file\)", id="not-utf-8"),
        pytest.param(b"{% generation %}a", r"chat\.jinja is no Jinja template: line 1: ", id="open-mark"),
        pytest.param(None, r"--data\.template .*chat\.jinja cannot be read: No such file", id="missing"),
    ],
)
def test_files_that_are_no_template_are_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        find_template(byte_tokenizer(), tmp_path / "chat.jinja")


@pytest.mark.parametrize("marked", [True, False])
def test_spans_are_the_assistants_turns(marked: bool) -> None:
    text, spans = named(template(CHATML, marked=marked)).render_learned(turns("a", "b", "c", "d"))
    end = "<|im_end|>" if marked else "<|im_end|>\n"
    assert [text[start:stop] for start, stop in spans] == [f"b{end}", f"d{end}"]


def test_a_message_of_weight_0_is_read_and_not_learned() -> None:
    chat = turns("a", "b", "c", "d")
    chat[1] |= {"weight": 0}
    chat[3] |= {"weight": 1}
    text, spans = named(template(CHATML, marked=False)).render_learned(chat)
    assert [text[start:stop] for start, stop in spans] == ["d<|im_end|>\n"]
    with pytest.raises(BadExample, match=r"has a message of weight 0, whose words chat\.jinja marks"):
        named(template(CHATML, marked=True)).render_learned(chat)
    _, of_completion = named(template(CHATML, marked=False)).render_learned(chat, prompt=1)
    assert len(of_completion) == 2  # a completion is learned whole
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    own = "{% for m in messages %}{% if m.weight == 1 %}MARK{% endif %}{% endfor %}".replace("MARK", mark)
    assert named(own).render_learned(chat) == ("d", [(0, 1)])


def test_marks_inside_macros_and_captured_text() -> None:
    source = (
        "{% macro say(m) %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
        "{% for m in messages %}{% set text %}{{ say(m) }}{% endset %}{{ m.role ~ text }}{% endfor %}"
    )
    text, spans = named(source).render_learned(turns("a", "b"))
    assert (text, [text[start:stop] for start, stop in spans]) == ("user[a]assistant[b]", ["a", "b"])
    assert named(source).render(turns("a", "b")) == text


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "{% for m in messages %}"
            "[{{ m.content if m.role == 'user' or loop.last else m.content.split('</think>')[-1] }}]"
            "{% endfor %}",
            id="strips-earlier-reasoning",
        ),
        pytest.param(
            "{% if messages | length == 1 %}<default>{% endif %}{% for m in messages %}[{{ m.content }}]{% endfor %}",
            id="default-system-prompt-at-first",
        ),
        pytest.param("{% for m in messages | reverse %}[{{ m.content }}]{% endfor %}", id="backwards"),
        pytest.param(
            "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
            id="generation-prompt-left-out",
        ),
    ],
)
def test_templates_without_prefixes_are_refused(source: str) -> None:
    chat = turns("a", "<think>1</think>b", "c", "<think>2</think>d")
    with pytest.raises(
        BadExample,
        match=r"so that the text of the first \d or \d messages is no beginning .* --data\.template",
    ):
        named(source).render_learned(chat)


def test_marks_that_enclose_nothing_are_refused() -> None:
    with pytest.raises(BadExample, match=r"has no words of the assistant that chat\.jinja marks"):
        named("{% generation %}{% endgeneration %}{{ messages[0].content }}").render_learned(turns("a", "b"))


def test_roles_that_a_template_refuses() -> None:
    with pytest.raises(BadExample, match=r"is refused by chat\.jinja: a chat begins with a user, not with assistant"):
        named(template(LLAMA, marked=True)).render([{"role": "assistant", "content": "a"}])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("{{ ''.__class__.__mro__ }}", "reaches what a chat template may not", id="attributes"),
        pytest.param("{{ messages.append(1) }}", "reaches what a chat template may not", id="changes-a-list"),
        pytest.param("{{ cycler.__init__.__globals__ }}", "reaches what a chat template may not", id="globals"),
        pytest.param("{{ range(10 ** 9) | list }}", "with a number above", id="range"),
        pytest.param("{{ range(10 ** 30) | list }}", "with a number above", id="range-past-int64"),
        pytest.param(
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "200,000 steps",
            id="loops",
        ),
        pytest.param(
            "{% set a = 'aa' * 9999 %}{% for b in a %}{% for c in a if c == 'b' %}{% endfor %}{% endfor %}",
            "200,000 steps",
            id="filtered-loops",
        ),
        pytest.param("{% for a in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}", "nests too deeply", id="recursion"),
        pytest.param("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "nests too deeply", id="macros"),
        pytest.param("{{ 'a' * 10 ** 10 }}", "more than 67,108,864 characters", id="repeats"),
        pytest.param("{{ 10 ** (10 ** 10) }}", "more than 4096 bits", id="power"),
        pytest.param(
            "{% set ns = namespace(t='aa') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
            "more than 67,108,864 characters",
            id="concatenation",
        ),
        pytest.param(
            "{% set ns = namespace(t='aa') %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
            "more than 67,108,864 characters",
            id="sums",
        ),
        pytest.param("{{ 'a'.ljust(10 ** 10) }}", "calls ljust with a number above 1,000,000", id="padding"),
        pytest.param("{{ '%9999999999d' % 1 }}", "a width of more than 9,999", id="format"),
        pytest.param("{{ messages[9].content }}", "has no element 9", id="index"),
        pytest.param("{{ 1 / 0 }}", "division by zero", id="division"),
        pytest.param("{{ lipsum() }}", "'lipsum' is undefined", id="lipsum"),
    ],
)
def test_hostile_templates_end_in_an_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"chat\.jinja") as refused:
        named(source).render(turns("a", "b"))
    assert message in str(refused.value)
