"""Sets of tokens to draw from, and ends of texts, are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.models import Llama, from_pretrained, save_pretrained
from weft.models.cli.generate import run
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer
from weft.models.generation import LogitsNotFinite, end_ids, filter_logits, generate, stream

from tests.models.cases import SMALL, make, some_tokens
from tests.models.test_tokens import saved, theirs


def warped(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    import transformers

    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    if top_k is not None:
        logits = transformers.TopKLogitsWarper(top_k)(ids, logits)
    if top_p is not None:
        logits = transformers.TopPLogitsWarper(top_p)(ids, logits)
    return logits


@pytest.mark.parametrize("top_p", [None, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 7, 61, 1000])
def test_the_tokens_that_are_kept_are_those_of_transformers(top_k: int | None, top_p: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 61, dtype=torch.float64, generator=generator) * torch.logspace(-2, 1.5, 40).unsqueeze(1)
    ties = torch.randint(0, 4, (40, 61), generator=generator).double()
    for given in (logits, ties):
        if given is ties and top_p not in (None, 1.0):
            continue  # which of two equal tokens is the last to be kept is said nowhere
        assert torch.equal(filter_logits(given, top_k, top_p), warped(given, top_k, top_p))


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"top_p": 0.3}, {"top_k": 5, "top_p": 0.8}, {"top_k": 5}], ids=str)
def test_no_token_is_drawn_that_is_not_kept(options: dict[str, Any]) -> None:
    model, prompt = make(SMALL), some_tokens(SMALL, 3, 5)
    drawn = generate(model, prompt, max_new_tokens=40, temperature=3.0, seed=2, **options)
    several = set()
    for t in range(5, 45):
        allowed = warped(model(drawn[:, :t])[:, -1].double() / 3.0, options.get("top_k"), options.get("top_p"))
        assert allowed.gather(1, drawn[:, t : t + 1]).isfinite().all()
        several |= set(drawn[:, t].tolist())
    assert len(several) > 5


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.5, float("nan")])
def test_a_top_p_out_of_range_is_named(top_p: float) -> None:
    with pytest.raises(ValueError, match=r"top_p is .*; it must be a number above 0, and at most 1"):
        generate(make(SMALL), some_tokens(SMALL, 1, 2), max_new_tokens=1, top_p=top_p)


NAN = float("nan")
WRONG: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": ("2", None, True, 2.0, NAN, [2], torch.tensor(2)),
    "temperature": ("1", None, True, NAN, [1.0], 1j),
    "top_k": ("2", True, 2.0, NAN, [2]),
    "top_p": ("0.5", True, NAN, [0.5], 1j),
    "use_cache": ("no", None, 1, 0.5, []),
    "ends": (None, 2, 2.0, "2", ["2"], [2.0], [True], [NAN], [None]),
    "prompts": (None, "ab", 5, [[0, 1]], [0, 1], [None]),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_another_kind_is_refused(name: str) -> None:
    model: Any = make(SMALL)
    right: dict[str, Any] = {"prompts": some_tokens(SMALL, 1, 2), "max_new_tokens": 2, "temperature": 1.0}
    assert generate(model, **right, top_k=np.int64(3), ends=(np.int64(1),)).shape[0] == 1
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"{name}.*; (it must be|give) "):
            generate(model, **{**right, name: value})


@pytest.mark.parametrize("count", [-1, 2**24 + 1, 2**70])
def test_more_tokens_than_memory_has_are_refused(count: int) -> None:
    with pytest.raises(
        ValueError, match=f"max_new_tokens is {count}; it must be a whole number, 0 or more, and at most 16,777,216"
    ):
        stream(make(SMALL), some_tokens(SMALL, 1, 2), max_new_tokens=count)


class TestEnds:
    """Greedy generation, whose tokens are known."""

    def drawn(self, rows: int = 3) -> tuple[Any, torch.Tensor, torch.Tensor]:
        model, prompts = make(SMALL), some_tokens(SMALL, rows, 5)
        return model, prompts, generate(model, prompts, max_new_tokens=12)[:, 5:]

    @pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
    @pytest.mark.parametrize("place", [0, 3, 11])
    def test_a_row_stops_at_an_end(self, place: int, use_cache: bool) -> None:
        model, prompts, free = self.drawn()
        end = int(free[1, place])
        options: dict[str, Any] = {"max_new_tokens": 12, "ends": [end, 1000], "use_cache": use_cache}
        firsts = [row.index(end) if end in row else 12 for row in free.tolist()]
        several = generate(model, list(prompts), **options)
        assert [len(row) - 5 for row in several] == [min(first + 1, 12) for first in firsts]
        together = generate(model, prompts, **options)
        assert together.shape[1] - 5 == min(max(firsts) + 1, 12)
        for row, first in enumerate(firsts):
            assert torch.equal(several[row][5:], free[row, : first + 1])
            assert torch.equal(together[row, 5:][: first + 1], free[row, : first + 1])
            assert (together[row, 5:][first + 1 :] == end).all()

    def test_the_ends_are_those_of_transformers(self) -> None:
        from tests.models.cases import theirs as their_model

        model, prompts, free = self.drawn()
        ends = [int(free[0, 2]), int(free[2, 4])]
        expected = their_model(model).generate(
            prompts, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=ends
        )
        found = generate(model, list(prompts), max_new_tokens=12, ends=ends)
        for row, tokens in enumerate(found):
            assert torch.equal(expected[row, : len(tokens)], tokens) and not expected[row, len(tokens) :].any()

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, (9,)),
            ({"generation_config": {"eos_token_id": 3}, "config": {"eos_token_id": 4}}, (3,)),
            ({"generation_config": {"eos_token_id": [3, 5]}, "config": {"eos_token_id": 4}}, (3, 5)),
            ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [4]}}, (4,)),
            ({"generation_config": {}, "config": {"eos_token_id": 0}}, (0,)),
            ({"config": {"eos_token_id": None}}, (9,)),
        ],
        ids=str,
    )
    def test_the_ends_of_a_folder(self, files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        assert end_ids(tmp_path, default=[9]) == expected

    @pytest.mark.parametrize("found", ["</s>", [1, "a"], True, 1.5, -1, 2**31, [0, 2**70]])
    def test_an_end_that_is_no_token_is_refused(self, found: Any, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": found}))
        with pytest.raises(ValueError, match=r"config.json: eos_token_id is .*; it must be the id of a token"):
            end_ids(tmp_path)


def of_bytes(folder: Path, **config: Any) -> Llama:
    """A model of bytes in a folder, and more of its config."""
    import dataclasses

    model = make(dataclasses.replace(SMALL, vocab_size=257))
    save_pretrained(model, folder, tokenizer=byte_tokenizer())
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (folder / "checksums.json").unlink()  # of the config that was
    return model


class TestCommand:
    def given(self, folder: Path, *more: str) -> int:
        return run([str(folder), "--prompt", "Call me", "--tokens", "30", "--temperature", "0", *more])

    def test_generate_stops_at_an_end_which_is_not_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = of_bytes(tmp_path / "model")
        prompt = byte_tokenizer().encode("Call me")
        free = generate(model, torch.tensor([prompt]), max_new_tokens=30)[0, len(prompt) :].tolist()
        assert self.given(tmp_path / "model") == 0
        whole = byte_tokenizer().decode([*prompt, *(free[: free.index(BYTE_END)] if BYTE_END in free else free)]) + "\n"
        assert capsys.readouterr().out == whole
        (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [free[4], free[9]]}))
        assert self.given(tmp_path / "model") == 0
        first = min(free.index(free[4]), free.index(free[9]))
        assert capsys.readouterr().out == byte_tokenizer().decode([*prompt, *free[:first]]) + "\n"

    @pytest.mark.few(1)
    @pytest.mark.parametrize("kind", ["llama-2", "byte-level-with-template", "sequence-with-tokens-added"])
    def test_generate_prints_the_text_of_transformers(
        self, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import dataclasses

        (tmp_path / "tokenizer").mkdir()
        tokenizer = theirs(saved(kind, tmp_path / "tokenizer"))
        model = make(dataclasses.replace(SMALL, vocab_size=len(tokenizer)))
        save_pretrained(model, tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        for prompt in ("<|im_start|>the warp", "the weft"):
            given = tokenizer(prompt, return_tensors="pt").input_ids
            drawn = generate(from_pretrained(tmp_path / "model"), given, max_new_tokens=9)[0]
            options = ["--tokens", "9", "--temperature", "0"]
            assert run([str(tmp_path / "model"), "--prompt", prompt, *options]) == 0
            shown, end = tokenizer.decode(given[0]), tokenizer.eos_token_id
            new = drawn.tolist()[
                : drawn.tolist().index(end, given.shape[1]) if end in drawn[given.shape[1] :] else None
            ]
            assert capsys.readouterr().out == prompt + tokenizer.decode(new)[len(shown) :] + "\n"

    def test_generate_draws_among_the_likeliest_tokens(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        of_bytes(tmp_path / "model")
        self.given(tmp_path / "model")
        greedy = capsys.readouterr().out
        for more in (["--top-k", "1"], ["--top-p", "1e-9"]):
            self.given(tmp_path / "model", "--temperature", "9", *more)
            assert capsys.readouterr().out == greedy
        self.given(tmp_path / "model", "--temperature", "9", "--top-k", "9", "--top-p", "0.9")
        assert capsys.readouterr().out != greedy

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompt", "a\udcffb"], "--prompt is not UTF-8: byte 0xff at character 1; convert it"),
            (
                ["--tokens", str(2**70)],
                f"--tokens is {2**70}; it must be a whole number, 0 or more, and at most 16,777,216",
            ),
            (["--top-k", "0"], "--top-k is 0; it must be a whole number, 1 or more"),
            (["--top-p", "1.1"], "--top-p is 1.1; it must be a number above 0, and at most 1"),
            (["--top-p", "nan"], "--top-p is nan; it must be a number above 0, and at most 1"),
        ],
        ids=str,
    )
    def test_an_argument_that_cannot_be_used_is_one_line(
        self, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            self.given(tmp_path, *arguments)
        assert (end.value.code, capsys.readouterr().err) == (2, f"weft generate: {message}\n")

    @pytest.mark.few(1)
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("temperature", ["0", "1"])
    def test_a_model_of_no_numbers_is_said(
        self, value: float, temperature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import dataclasses

        model = make(dataclasses.replace(SMALL, vocab_size=257))
        with torch.no_grad():
            model.lm_head.weight.fill_(value)
        save_pretrained(model, tmp_path / "model", tokenizer=byte_tokenizer())
        assert self.given(tmp_path / "model", "--temperature", temperature) == 1
        assert "the model's logits for new token 0 of row 0 are NaN or infinite" in capsys.readouterr().err


def test_nan_of_one_row_is_named() -> None:
    model = make(SMALL)
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")
    prompts = torch.tensor([[1, 2], [1, 7]])
    with pytest.raises(LogitsNotFinite, match="new token 0 of row 1"):
        generate(model, prompts, max_new_tokens=2)
