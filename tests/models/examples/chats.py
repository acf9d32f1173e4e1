"""Small tokenizers with chat templates, as folders that Weft and transformers read, and records to encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- BEGIN %}{{- message['content'] + '<|im_end|>' }}{%- END %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role not in ('system', 'user') %}
        {{- raise_exception('a chat begins with a user, not with ' + message.role) }}
    {%- endif %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- BEGIN %}{{- message.content | trim + '<|eot|>' }}{%- END %}
    {%- else %}
        {{- message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""


def template(source: str, *, marked: bool) -> str:
    """A template with the tag generation, or without."""
    begin, end = ("generation", "endgeneration") if marked else ("if true", "endif")
    return source.replace("BEGIN", begin).replace("END", end)


SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
WORDS = "What color is the sky? It is blue. Where is the sun? In the sea, or wärp and weft ☃ system user assistant\n\n"


def folder(path: Path, kind: str, *, marked: bool = True) -> Path:
    """A tokenizer's folder. kind: chatml (no BOS), llama (BOS before prompts), plain (no template and no BOS)."""
    path.mkdir(parents=True)
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama")
    made.pre_tokenizer = level
    if kind == "llama":  # splits as Llama 3: newlines stay together before a word
        split = pre_tokenizers.Split(Regex(r"\s?\p{L}+|[^\s\p{L}]+|\s*[\r\n]+|\s+"), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS] * 4, trainer)
    trimmed = processors.ByteLevel(trim_offsets=True)
    made.post_processor = trimmed
    if kind == "llama":
        begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
        made.post_processor = processors.Sequence([trimmed, begin])
    made.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": {"chatml": "<|im_end|>", "llama": "<|eot|>"}.get(kind, "<|endoftext|>")}
    if kind == "llama":
        config["bos_token"] = "<|begin|>"
    if kind != "plain":
        source = {"chatml": CHATML, "llama": LLAMA}[kind]
        config |= {"pad_token": "<|endoftext|>", "chat_template": template(source, marked=marked)}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages, beginning with the user's, in turns with the assistant's."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS: list[dict[str, Any]] = [
    {"messages": turns("What color is the sky?", "It is blue.")},
    {"messages": turns("Where is the sun?", "In the sea", "☃☃ or wärp?", "weft\n\nand the sun")},
    {"messages": [{"role": "system", "content": "the sea"}, *turns("the sky?", "the sky is the sky.\n")]},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "What color is the sky?", "completion": " It is blue."},
    {"prompt": "Where is the sun?\n", "completion": "In the ☃."},
    {"prompt": "the sky", "completion": " is the sun and the sea"},
]
PROMPTED: list[dict[str, Any]] = [
    {"prompt": each["messages"][:-1], "completion": each["messages"][-1:]} for each in CHATS
]
