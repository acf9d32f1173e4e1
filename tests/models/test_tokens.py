"""A prompt's tokens are those of transformers' AutoTokenizer, for every kind of tokenizer folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from weft.models import save_pretrained
from weft.models.checkpoint.companions import read_companions
from weft.models.checkpoint.convert import convert
from weft.models.data.tokenizer import FILES, byte_tokenizer, find_tokenizer

from tests.models.cases import SMALL, make

TEXTS = [
    "the warp and the weft",
    "a loom, a shuttle; wärp ☃ and Weft",
    "The end. " * 3,
    "  two  spaces\n\tand tabs",
] * 4
PROMPTS = [
    "the warp",
    "<|im_start|>user\nthe weft<|im_end|>\n",
    "<s>the loom</s> <s> a",
    " the <|endoftext|>",
    "The Wärp [MASK] ☃",
    "<think> the</think>new<extra>",
    "",
]


def learned(kind: str) -> Tokenizer:
    """A small tokenizer of a kind, with a few special tokens, from TEXTS."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "sequence":  # as Llama 3 and Qwen 2 split
        made = Tokenizer(models.BPE())
        parts = [pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s?\p{L}+|[^\s\p{L}\p{N}]+|\s+"), "isolated")]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "metaspace-normalized":  # Llama 2: a normalizer puts "▁" before a text, and after each special token
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        )
    elif kind == "metaspace":  # Llama 2 with legacy=False
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    else:
        assert kind == "wordpiece"
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=False)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=[*bert, *special])
    trainer.show_progress = False
    made.train_from_iterator(TEXTS, trainer)
    return made


def with_template(made: Tokenizer, before: str = "<s>", after: str = "") -> Tokenizer:
    special = [(token, made.token_to_id(token)) for token in {before, after} if token]
    made.post_processor = processors.TemplateProcessing(single=f"{before} $A {after}".strip(), special_tokens=special)
    return made


def listed(made: Tokenizer, more: tuple[str, ...] = (), **flags: bool) -> dict[str, Any]:
    """The tokens of `added_tokens_decoder`: the file's, and more."""
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    found = {
        str(i): {name: getattr(each, name) for name in names} for i, each in made.get_added_tokens_decoder().items()
    }
    first = made.get_vocab_size()
    plain = dict.fromkeys(names[1:], False) | flags
    return found | {str(first + i): {"content": token, **plain} for i, token in enumerate(more)}


ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS}
BERT = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **ENDS}
Made = Callable[[], tuple[Tokenizer, dict[str, Any]]]


def case(kind: str, /, *, after: str = "", template: bool = False, **files: Any) -> Made:
    """A tokenizer of a kind, and the files beside tokenizer.json; a function there is given the tokenizer."""

    def make() -> tuple[Tokenizer, dict[str, Any]]:
        made = learned(kind)
        if template:
            with_template(made, after=after)
        return made, {f"{name}.json": value(made) if callable(value) else value for name, value in files.items()}

    return make


CASES = {
    "byte-level-with-template": case("byte-level", template=True, tokenizer_config=FAST),
    "byte-level-template-of-both": case("byte-level", template=True, after="</s>", tokenizer_config=FAST),
    "byte-level-with-an-ignored-option": case("byte-level", tokenizer_config=FAST | {"add_bos_token": True}),
    "byte-level-with-a-prefix-space": case("byte-level", tokenizer_config=FAST | {"add_prefix_space": True}),
    "gpt2": case("byte-level", tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
    "gpt2-by-its-config": case("byte-level", config={"model_type": "gpt2"}),
    "neox-with-bos": case(
        "byte-level", tokenizer_config=ENDS | {"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True}
    ),
    "neox-without": case(
        "byte-level", template=True, tokenizer_config=ENDS | {"tokenizer_class": "GPTNeoXTokenizerFast"}
    ),
    "qwen2": case(
        "sequence", tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}
    ),
    "qwen2-by-its-config": case("sequence", config={"model_type": "qwen2"}),
    "sequence-with-tokens-added": case(
        "sequence",
        tokenizer_config=lambda made: (
            FAST | {"added_tokens_decoder": listed(made, ("<think>", "</think>"), normalized=True)}
        ),
    ),
    "tokens-that-strip": case(
        "byte-level",
        tokenizer_config=lambda made: (
            FAST | {"added_tokens_decoder": listed(made, ("<think>",), lstrip=True, rstrip=True)}
        ),
    ),
    "special-tokens-that-are-new": case(
        "byte-level", tokenizer_config=FAST | {"additional_special_tokens": ["<extra>", "<think>"]}
    ),
    "a-special-tokens-map": case(
        "byte-level",
        tokenizer_config=FAST | {"additional_special_tokens": ["<think>"]},
        special_tokens_map={
            "pad_token": {"content": "<extra>", "lstrip": True},
            "additional_special_tokens": ["</think>"],
        },
    ),
    "a-special-tokens-map-that-does-not-count": case(
        "byte-level",
        tokenizer_config=lambda made: FAST | {"added_tokens_decoder": listed(made)},
        special_tokens_map={"pad_token": "<extra>"},
    ),
    "bos-of-a-map": case(
        "metaspace", tokenizer_config={"tokenizer_class": "LlamaTokenizer"},
        special_tokens_map={"bos_token": "<|im_start|>"}
    ),
    "llama-2": case("metaspace-normalized", template=True, tokenizer_config=LLAMA),
    "llama-2-legacy": case("metaspace-normalized", tokenizer_config=LLAMA | {"legacy": True}),
    "llama-2-without-bos": case(
        "metaspace-normalized", template=True, tokenizer_config=LLAMA | {"add_bos_token": False}
    ),
    "llama-2-with-eos": case("metaspace-normalized", tokenizer_config=LLAMA | {"add_eos_token": True}),
    "llama-with-defaults": case("metaspace", tokenizer_config={"tokenizer_class": "LlamaTokenizerFast"}),
    "llama-by-its-config": case("metaspace", config={"model_type": "llama"}),
    "mistral-by-its-config": case("metaspace", config={"model_type": "mistral"}),
    "llama-of-bytes": case("byte-level", tokenizer_config=LLAMA),
    "gemma": case("metaspace", tokenizer_config=ENDS | {"tokenizer_class": "GemmaTokenizer"}),
    "cohere": case("byte-level", tokenizer_config=ENDS | {"tokenizer_class": "CohereTokenizerFast"}),
    "metaspace-with-an-object": case(
        "metaspace", tokenizer_config=FAST | {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}}
    ),
    "unigram": case("unigram", template=True, after="</s>", tokenizer_config=FAST),
    "unigram-with-tokens-added": case(
        "unigram",
        tokenizer_config=lambda made: FAST | {"added_tokens_decoder": listed(made, ("<extra>",), special=True)}
    ),
    "wordpiece": case("wordpiece", tokenizer_config=BERT | {"do_lower_case": False}),
    "wordpiece-in-lower-case": case("wordpiece", tokenizer_config=BERT),
    "wordpiece-of-no-class": case("wordpiece", tokenizer_config=FAST),
}  # fmt: skip


def saved(name: str, folder: Path) -> Path:
    made, files = CASES[name]()
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    made.save(str(folder / "tokenizer.json"))
    return folder


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_a_prompt_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = theirs(saved(name, tmp_path))
    found = find_tokenizer(tmp_path)
    assert [found.encode(text) for text in PROMPTS] == [expected(text).input_ids for text in PROMPTS]
    assert found.vocab_size == max(expected.get_vocab().values()) + 1


@pytest.mark.parametrize("name", CASES)
def test_the_files_that_travel_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    found = find_tokenizer(saved(name, tmp_path / "here"))
    for file, content in found.files:
        (tmp_path / "there" / file).write_bytes(content)
    again = find_tokenizer(tmp_path / "there")
    assert again == found and again.sha256 == found.sha256
    expected = theirs(tmp_path / "there")
    assert [again.encode(text) for text in PROMPTS] == [expected(text).input_ids for text in PROMPTS]
    assert expected.eos_token_id == found.end


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_the_pieces_of_a_stream_are_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    """Text after a prompt keeps its first space."""
    expected = theirs(saved(name, tmp_path))
    found = find_tokenizer(tmp_path)
    for prompt in PROMPTS:
        for text in TEXTS[:4]:
            before, new = found.encode(prompt), found.encode_document(text)
            whole, shown = (
                expected.decode(each, clean_up_tokenization_spaces=False) for each in (before + new, before)
            )
            assert "".join(found.decode_each(iter(new), after=before)) == whole[len(shown) :]
            assert "".join(found.decode_each(iter(new))) == found.decode(new)


@pytest.mark.parametrize("name", ["llama-2", "llama-with-defaults", "unigram"])
def test_the_space_before_the_first_word_of_a_stream_is_there(name: str, tmp_path: Path) -> None:
    found = find_tokenizer(saved(name, tmp_path))
    new = found.encode_document("the weft")
    assert "".join(found.decode_each(new, after=found.encode("the warp and"))) == " the weft"


@pytest.mark.parametrize(
    "name", ["llama-2", "metaspace-with-an-object", "byte-level-with-template", "qwen2", "unigram"]
)
def test_the_pieces_of_any_tokens_are_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    """Also for tokens that no text gives: characters cut between bytes, special tokens, and neither."""
    expected = theirs(saved(name, tmp_path))
    found = find_tokenizer(tmp_path)
    draw = random.Random(5)
    for length in (1, 2, 3, 40):
        for _ in range(40):
            before, new = found.encode("the warp"), [draw.randrange(found.vocab_size) for _ in range(length)]
            whole, shown = (
                expected.decode(each, clean_up_tokenization_spaces=False) for each in (before + new, before)
            )
            assert "".join(found.decode_each(iter(new), after=before)) == whole[len(shown) :]


def test_a_prompt_of_bytes_is_that_of_transformers(tmp_path: Path) -> None:
    for file, content in byte_tokenizer().files:
        (tmp_path / file).write_bytes(content)
    expected, found = theirs(tmp_path), find_tokenizer(tmp_path)
    assert found == byte_tokenizer()
    for text in [*PROMPTS, "<|endoftext|><|endoftext|>a<|endoftext|>"]:
        assert found.encode(text) == expected(text).input_ids
        assert found.encode_document(text) == list(text.encode())


@pytest.mark.parametrize("name", ["byte-level-with-template", "llama-2", "sequence-with-tokens-added", "wordpiece"])
def test_a_document_has_no_special_tokens_of_its_text(name: str, tmp_path: Path) -> None:
    found = find_tokenizer(saved(name, tmp_path))
    special = {found.end, found.bos, *found.begin}
    for text in ["<s>the loom</s>", "<s></s>", "[SEP] the [CLS]"]:
        assert not special & set(found.encode_document(text))


@pytest.mark.parametrize(
    ("name", "begin", "bos"),
    [
        ("byte-level-with-template", ["<s>"], "<s>"),
        ("byte-level-template-of-both", ["<s>"], "<s>"),
        ("byte-level-with-an-ignored-option", [], "<s>"),
        ("llama-2-with-eos", ["<s>"], "<s>"),
        ("llama-2-without-bos", [], "<s>"),
        ("qwen2", [], None),
    ],
)
def test_the_tokens_that_begin_a_prompt_are_known(name: str, begin: list[str], bos: str | None, tmp_path: Path) -> None:
    found = find_tokenizer(saved(name, tmp_path))
    numbers = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id
    assert found.begin == tuple(map(numbers, begin))
    assert found.bos == (None if bos is None else numbers(bos))


def test_a_class_that_begins_with_a_token_that_nothing_names_is_refused(tmp_path: Path) -> None:
    saved("llama-2", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA | {"bos_token": None}))
    with pytest.raises(ValueError, match=r"add_bos_token is true .* there is no bos_token; name the bos_token"):
        find_tokenizer(tmp_path)


class TestChatTemplates:
    @pytest.mark.parametrize("as_files", [True, False], ids=["files", "config"])
    def test_named_templates_travel(self, as_files: bool, tmp_path: Path) -> None:
        (tmp_path / "here").mkdir()
        tokenizer = theirs(saved("llama-2", tmp_path / "here"))
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
        tokenizer.save_pretrained(tmp_path / "saved", save_jinja_files=as_files)
        assert (tmp_path / "saved/additional_chat_templates").is_dir() == as_files
        for name, files in {
            "tokenizer": dict(find_tokenizer(tmp_path / "saved").files),
            "beside": read_companions(tmp_path / "saved", FILES),
        }.items():
            (tmp_path / name).mkdir()
            for file, content in files.items():
                (tmp_path / name / file).write_bytes(content)  # each is a plain name
            assert theirs(tmp_path / name).chat_template == tokenizer.chat_template

    def test_named_templates_are_converted_there_and_back(self, tmp_path: Path) -> None:
        tokenizer = theirs(saved("llama-2", tmp_path))
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        save_pretrained(make(SMALL), tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        assert convert(tmp_path / "model", tmp_path / "checkpoint") == []
        assert convert(tmp_path / "checkpoint", tmp_path / "again") == []
        assert theirs(tmp_path / "again").chat_template == tokenizer.chat_template

    @pytest.mark.parametrize("name", ["rag", "default"])
    def test_one_template_of_a_folder_travels(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "here/additional_chat_templates").mkdir(parents=True)
        saved("byte-level-with-template", tmp_path / "here")
        (tmp_path / f"here/additional_chat_templates/{name}.jinja").write_text("{{ documents }}")
        expected = theirs(tmp_path / "here").chat_template
        (tmp_path / "there").mkdir()
        for file, content in find_tokenizer(tmp_path / "here").files:
            (tmp_path / "there" / file).write_bytes(content)
        assert theirs(tmp_path / "there").chat_template == expected

    def test_a_template_of_a_tokenizer_of_bytes_travels(self, tmp_path: Path) -> None:
        for file, content in byte_tokenizer().files:
            (tmp_path / file).write_bytes(content)
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
        found = find_tokenizer(tmp_path)
        assert found.is_bytes
        assert json.loads(dict(found.files)["tokenizer_config.json"])["chat_template"] == "{{ messages }}"


def test_every_file_of_a_tokenizer_travels(tmp_path: Path) -> None:
    saved("llama-2", tmp_path)
    others = {"vocab.json": b"{}", "merges.txt": b"a b\n", "tokenizer.model": b"\x00\x01", "added_tokens.json": b"{}"}
    for file, content in others.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "tokenization_own.py").write_text("never read")
    found = dict(find_tokenizer(tmp_path).files)
    assert {name: found[name] for name in others if name != "added_tokens.json"} == {
        name: others[name] for name in others if name != "added_tokens.json"
    }
    assert "added_tokens.json" in found and "tokenization_own.py" not in found
    assert read_companions(tmp_path, FILES)["tokenizer.model"] == b"\x00\x01"


def test_a_token_with_spaces_may_begin_a_prompt(tmp_path: Path) -> None:
    made = learned("metaspace")
    made.add_special_tokens([AddedToken("<a b>")])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA | {"bos_token": "<a b>"}))
    assert find_tokenizer(tmp_path).encode("the")[0] == made.token_to_id("<a b>")
