"""`weft generate --chat`: answers are those of transformers, in one turn and in many, and misuse is one line."""

import io
import json
import sys
from pathlib import Path

import pytest
import transformers
from weft.models import generation
from weft.models.cli import chat as chat_command
from weft.models.cli.generate import run

from tests.models.chat_folder import LENGTH, save_chat_folder

LINES = ["What is a warp?", "And a weft, in one word?", "Thank you."]
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "llama"
    save_chat_folder(folder)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "folder"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


class Chat:
    """Calls `weft generate --chat`; records the prompts and the drawn tokens."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.prompts: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.status = 0
        original = generation.stream

        def recorded(model, prompts, **options):
            self.prompts.append(prompts[0].tolist())
            self.tokens.append([])
            for tokens in original(model, prompts, **options):
                self.tokens[-1].append(int(tokens))
                yield tokens

        monkeypatch.setattr(generation, "stream", recorded)

    def __call__(self, folder: Path, *options: str, lines: str | bytes = "") -> str:
        """The output. The exit status and the errors are in `status` and `err`."""
        given = lines if isinstance(lines, bytes) else lines.encode()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        try:
            self.status = run([str(folder), "--chat", *options])
        except SystemExit as end:
            self.status = int(end.code or 0)
        out, self.err = self._capsys.readouterr()
        return out


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    return Chat(capsys, monkeypatch)


def their_answers(folder: Path, lines: list[str], *, tokens: int, system: str | None = None, **options):
    """The prompts, new tokens and texts of transformers' conversation, computed anew for each message."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        whole = model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)
        new = whole[0, prompt.shape[1] :].tolist()
        text = tokenizer.decode([token for token in new if token not in model.generation_config.eos_token_id])
        messages.append({"role": "assistant", "content": text})
        found.append((prompt[0].tolist(), new, text))
    return found


def set_ends(folder: Path, *ends: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *ends]}))


class TestAnswers:
    @pytest.mark.few(1)
    @pytest.mark.parametrize("system", [None, "Answer as a weaver would."], ids=["plain", "system"])
    def test_a_conversation_is_transformers_token_for_token(self, chat: Chat, folder: Path, system: str | None) -> None:
        set_ends(folder)
        theirs = their_answers(folder, LINES, tokens=16, system=system)
        options = () if system is None else ("--system", system)
        out = chat(folder, *GREEDY, *options, "--tokens", "16", lines="\n".join(LINES))
        assert (chat.status, chat.err) == (0, "")
        assert list(zip(chat.prompts, chat.tokens, strict=True)) == [(prompt, new) for prompt, new, _ in theirs]
        assert out == "".join(f"{text}\n" for _, _, text in theirs)

    def test_an_answer_stops_at_any_end_of_the_folder(self, chat: Chat, folder: Path) -> None:
        set_ends(folder)
        ((_, new, _),) = their_answers(folder, LINES[:1], tokens=16)
        set_ends(folder, new[5])
        ((_, stopped, text),) = their_answers(folder, LINES[:1], tokens=16)
        assert len(stopped) == new.index(new[5]) + 1 < 16
        assert chat(folder, *GREEDY, "--tokens", "16", "--prompt", LINES[0]) == f"{text}\n"
        assert chat.tokens == [stopped]

    def test_an_answer_stops_at_the_templates_end_of_turn(self, chat: Chat, folder: Path) -> None:
        """A base model's generation_config names <|endoftext|>, but the template ends turns by another token."""
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
        ended: list[tuple[int, ...]] = []
        original = generation.stream

        def recorded(*arguments, **options):
            ended.append(options["ends"])
            return original(*arguments, **options)

        chat._monkeypatch.setattr(generation, "stream", recorded)
        chat(folder, *GREEDY, "--tokens", "2", "--prompt", "a")
        assert ended == [(0, 2)]

    def test_only_the_tokens_that_are_new_are_read_in_a_later_turn(self, chat: Chat, folder: Path) -> None:
        counts: list[int] = []

        class Counting(chat_command.Conversation):
            def __init__(self, model, *rest):
                super().__init__(model, *rest)
                model.embed_tokens.register_forward_pre_hook(lambda module, inputs: counts.append(inputs[0].shape[1]))

        chat._monkeypatch.setattr(chat_command, "Conversation", Counting)
        chat(folder, *GREEDY, "--tokens", "16", lines="\n".join(LINES))
        starts = [count for count in counts if count > 1]
        assert len(starts) == 3
        assert starts[0] == len(chat.prompts[0])
        # The text of an answer may have other tokens than those drawn; the prompt before the answer has the same.
        for start, before, prompt in zip(starts[1:], chat.prompts, chat.prompts[1:], strict=False):
            assert start <= len(prompt) - len(before)

    def test_the_template_may_come_from_a_file(self, chat: Chat, folder: Path, tmp_path: Path) -> None:
        set_ends(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        file = tmp_path / "own.jinja"
        file.write_text("{% for each in messages %}[{{ each.role }}] {{ each.content }} {% endfor %}")
        chat(folder, *GREEDY, "--tokens", "3", "--prompt", "warp", "--template", str(file))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(chat.prompts[0]) == "[user] warp "
        assert len(chat.tokens[0]) == 3

    @pytest.mark.exhaustive
    def test_a_long_conversation_leaves_out_its_oldest_turns_and_says_so_once(self, chat: Chat, folder: Path) -> None:
        set_ends(folder)
        lines = [f"{number} is the number of this message." for number in range(30)]
        out = chat(folder, *GREEDY, "--tokens", "12", "--system", "Be brief.", lines="\n".join(lines))
        assert chat.status == 0 and out
        assert chat.err == (
            f"weft generate: the conversation is longer than the model's {LENGTH} tokens; its oldest turns are left "
            f"out\n"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert max(map(len, chat.prompts)) <= LENGTH - 12
        for line, prompt in zip(lines, chat.prompts, strict=True):
            text = tokenizer.decode(prompt)
            assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
            assert text.endswith(f"<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n")
        assert lines[0] not in tokenizer.decode(chat.prompts[-1])

    def test_blank_lines_are_no_messages(self, chat: Chat, folder: Path) -> None:
        out = chat(folder, *GREEDY, "--tokens", "3", lines="\n  \nHello\n\n")
        assert (chat.status, len(chat.prompts)) == (0, 1)
        assert out.count("\n") >= 1

    def test_no_input_is_no_error(self, chat: Chat, folder: Path) -> None:
        assert (chat(folder), chat.status, chat.err) == ("", 0, "")


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"


class TestErrors:
    def test_a_folder_without_a_template(self, chat: Chat, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        (folder / "model.safetensors").unlink()
        assert (chat(folder), chat.status) == ("", 2)
        assert chat.err.startswith(f"weft generate: {folder} has no chat template")
        assert "--template FILE" in chat.err and chat.err.count("\n") == 1

    def test_a_template_that_refuses_a_role(self, chat: Chat, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "no-system.jinja"
        file.write_text(REFUSING)
        (folder / "model.safetensors").unlink()
        assert (chat(folder, "--template", str(file), "--system", "Be brief."), chat.status) == ("", 2)
        assert "System role not supported" in chat.err and str(file) in chat.err and chat.err.count("\n") == 1

    def test_a_template_file_that_is_no_template(self, chat: Chat, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "broken.jinja"
        file.write_text("{% for")
        assert (chat(folder, "--template", str(file)), chat.status) == ("", 2)
        assert str(file) in chat.err and chat.err.count("\n") == 1
        assert (chat(folder, "--template", str(tmp_path / "none")), chat.status) == ("", 2)
        assert "--template" in chat.err and "--data.template" not in chat.err and chat.err.count("\n") == 1

    def test_an_empty_answer(self, chat: Chat, folder: Path) -> None:
        set_ends(folder)
        ((_, new, _),) = their_answers(folder, LINES[:1], tokens=1)
        set_ends(folder, new[0])
        assert (chat(folder, *GREEDY, "--prompt", LINES[0]), chat.status) == ("", 2)
        assert chat.err.startswith("weft generate: the answer to --prompt is empty: the model's first token ends it")
        assert (chat(folder, *GREEDY, lines=f"\n{LINES[0]}\n"), chat.status) == ("", 2)
        assert "line 2 of standard input" in chat.err and chat.err.count("\n") == 1

    def test_a_message_that_is_too_long_for_the_model(self, chat: Chat, folder: Path) -> None:
        assert (chat(folder, "--prompt", "warp " * LENGTH), chat.status) == ("", 2)
        assert f"the model's length is {LENGTH}" in chat.err and chat.err.count("\n") == 1

    def test_lines_that_are_not_utf_8(self, chat: Chat, folder: Path) -> None:
        chat(folder, "--tokens", "2", lines=b"caf\xe9\n")
        assert chat.status == 2
        assert "standard input is not UTF-8" in chat.err and "0xe9" in chat.err and chat.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            pytest.param(["--chat", "--tokens", "0"], "--tokens is 0; an answer needs 1 or more", id="tokens"),
            pytest.param(["--chat", "--system", ""], "--system is empty; give a message", id="system"),
            pytest.param(["--prompt", "a", "--system", "b"], "--system is an option of --chat; add", id="no-chat"),
            pytest.param([], "--prompt is missing; give a text to continue, or --chat", id="no-prompt"),
        ],
    )
    def test_options(self, chat: Chat, folder: Path, options: list[str], error: str) -> None:
        with pytest.raises(SystemExit) as ended:
            run([str(folder), *options])
        assert ended.value.code == 2
        assert chat._capsys.readouterr().err.startswith(f"weft generate: {error}")
