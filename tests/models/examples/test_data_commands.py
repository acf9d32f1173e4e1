"""`weft data` with examples: prepare, show and verify."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.models.examples.records import write_records
from tests.models.test_bad_data import weft

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_examples_are_prepared_shown_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    write_records(Path("in.jsonl"), "dpo", 12)
    options = ("data", "prepare", "in.jsonl", "--task", "dpo", "--output", "out")
    status, out, err = weft(capsys, *options)
    assert (status, err) == (0, "")
    assert out.startswith("prepared out: 12 pairs, ")
    assert "% learned) of 257 kinds, uint16, in 1 shard\n" in out
    assert out.endswith("next  weft data show out\n      weft train --from FOLDER --task dpo --data.path out\n")
    assert weft(capsys, *options)[:2] == (0, out)  # nothing to do
    assert weft(capsys, "data", "verify", "out")[0] == 0
    shown = weft(capsys, "data", "show", "out", "--rows", "2")
    assert shown[0] == 0
    assert shown[1] == (
        "example 1, chosen: 9 tokens, 6 learned\n0? ⟦yes 0<|endoftext|>⟧\n"
        "example 1, rejected: 8 tokens, 5 learned\n0? ⟦no 0<|endoftext|>⟧\n"
        "example 2, chosen: 14 tokens, 7 learned\n1? why ⟦yes 1!<|endoftext|>⟧\n"
        "example 2, rejected: 12 tokens, 5 learned\n1? why ⟦no 1<|endoftext|>⟧\n"
    )
    assert weft(capsys, "data", "show", "in.jsonl", "--task", "dpo", "--rows", "2") == shown


def test_a_judged_completion_is_shown_with_its_label_and_the_other_completion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_records(Path("in.jsonl"), "kto", 3)
    assert weft(capsys, "data", "show", "in.jsonl", "--task", "kto", "--rows", "1")[1] == (
        "example 1, completion, undesirable: 11 tokens, 8 learned\n0? ⟦since 0<|endoftext|>⟧\n"
        "example 1, with the completion of another example: 13 tokens, 10 learned\n"
        "0? ⟦since 2..<|endoftext|>⟧\n"
    )


def test_a_terminal_shows_learned_text_in_green_and_hostile_text_is_harmless(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "Wä\x1b[31m?"}, {"role": "assistant", "content": "☃"}]
    Path("in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    Path("chat.jinja").write_text(TEMPLATE)
    options = ("data", "show", "in.jsonl", "--task", "sft", "--template", "chat.jinja")
    plain = "<user>Wä\ufffd[31m?\n<assistant>⟦☃\n⟧\n"
    assert weft(capsys, *options)[1].partition("\n")[2] == plain
    monkeypatch.setattr("weft.models.terminal.SafeStream.isatty", lambda self: True, raising=False)
    coloured = "\033[2m<user>Wä\ufffd[31m?\n<assistant>\033[0m\033[32m☃\n\033[0m\n"
    assert weft(capsys, *options)[1].partition("\n")[2] == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert weft(capsys, *options)[1].partition("\n")[2] == plain
    assert sys.stdout is not None


def test_documents_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text("word " * 10**number)
    status, out, _ = weft(capsys, "data", "show", "texts", "--rows", "9")
    assert status == 0
    assert out.startswith("document 1: 6 tokens\nword <|endoftext|>\ndocument 2: 51 tokens\n")
    assert "document 4: 5,001 tokens, the first 2,000 shown\n" in out
    assert weft(capsys, "data", "prepare", "texts", "--output", "out")[0] == 0
    assert weft(capsys, "data", "show", "out", "--rows", "9")[1] == out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param("prepare in.jsonl --task dpo", "and dpo reads chosen and rejected", id="another-form"),
        pytest.param("prepare in.jsonl --task sft --bos", "--bos is for texts, and --task sft reads records", id="bos"),
        pytest.param("prepare in.jsonl --task sft --no-eos", "--no-eos is for texts, and --task sft", id="no-eos"),
        pytest.param("prepare in.jsonl --task sft --field a", "--field a is for texts", id="field"),
        pytest.param("prepare in.jsonl --template chat.jinja", "chat.jinja is for examples; give", id="template"),
        pytest.param("prepare in.jsonl --task sft --template no", "--template no cannot be read", id="no-template"),
        pytest.param("prepare chats.jsonl --task sft", "or --template FILE", id="messages-without-template"),
        pytest.param("prepare none.jsonl --task sft", "none.jsonl hold no example of sft: 2 blank lines", id="none"),
        pytest.param("show in.jsonl --rows 0", "--rows is 0; it must be 1 or more", id="no-rows"),
        pytest.param("show in.jsonl --tokenizer a", "is for examples; give --task sft, dpo or kto", id="tokenizer"),
        pytest.param("show nowhere --task sft", "nowhere does not exist", id="missing"),
    ],
)
def test_input_that_cannot_be_used_is_refused_in_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(Path("in.jsonl"), "sft", 3)
    Path("none.jsonl").write_text("\n\n")
    Path("chats.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    output = ("--output", "out") if arguments.startswith("prepare") else ()
    status, out, err = weft(capsys, "data", *arguments.split(), *output)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not Path("out").exists()
