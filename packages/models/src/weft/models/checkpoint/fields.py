"""The fields of Hugging Face's config.json, and what each is to a model of ours: read, fixed, or without meaning for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from ..documents import as_type, types_of

# Fields that say nothing about the network. First those about the file itself and about how a program runs the model.
_FILE = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "gradient_checkpointing",
        "is_decoder",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
    ]
)

# How text becomes tokens and tokens text, settings of generation, and of tasks beyond the next token: these go along with a model.
COMPANIONS = frozenset(
    [
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "typical_p",
        "unk_token_id",
        "use_cache",
    ]
)
# The types of the fields that are computed with, though they are of no network.
_TYPES: Mapping[str, Any] = dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id"), int | tuple[int, ...] | None
)
MEANINGLESS = _FILE | COMPANIONS

# What would make another network of any family, and the values with which it does not.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

_REMEDIES = {"quantization_config": "quantized weights are not supported; save the model dequantized"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a family makes of the fields of its config.json.

    model: what it is called in errors. config: our config, whose types the values have. names: Hugging Face's name of each field that is one of ours, and ours.
    required: of these, those that must be there. defaults: what transformers takes for a field that is absent, where that
    is not our default. fixed: fields with one meaning here, and the values that say it. elsewhere: fields that the family
    reads itself. meaningless: fields of its own that say nothing about the network. nullable: sizes that transformers works
    out from other sizes where they are null, as our config does where they are absent; any other null is an error.
    """

    model: str
    config: type[ModelConfig]
    names: Mapping[str, str]
    required: Collection[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    elsewhere: Collection[str] = ()
    meaningless: Collection[str] = ()
    nullable: Collection[str] = ()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The values of our config's fields; those that the file leaves open are not among them.

        Raises ValueError for a field that is missing, unknown, null or of another type, or has a value that the model does not have.
        """
        for name in self.required:
            if config.get(name) is None:
                raise ValueError(f"config.json has no {name!r}; a {self.model} needs {', '.join(self.required)}")
        for name, value in config.items():
            self._check(name, value)
        given = {**self.defaults, **config}
        return {ours: given[theirs] for theirs, ours in self.names.items() if given.get(theirs) is not None}

    def write(self, config: object) -> dict[str, Any]:
        """What config.json says of a config of ours, but for what is read elsewhere."""
        written = {theirs: getattr(config, ours) for theirs, ours in self.names.items()}
        fixed = {name: values[0] for name, values in self.fixed.items()}
        # transformers would take its own for tokens that are absent, whatever they mean here.
        return {**fixed, **written, "bos_token_id": None, "eos_token_id": None}

    def _check(self, name: str, value: Any) -> None:
        if name in self.nullable and value == 0:
            raise ValueError(
                f"config.json: {name} is {value!r}; give a size, or null for the size that follows from the others"
            )
        if value is None and name in self.names and name not in self.nullable:
            raise ValueError(
                f"config.json: {name} is null, which says no value; give the value that the model was trained with, or remove "
                f"the field for the default"
            )
        if name in self.names and value is not None:
            as_type(types_of(self.config)[self.names[name]], value, f"config.json: {name}")
        if name in _TYPES:
            as_type(_TYPES[name], value, f"config.json: {name}")
        if name in self.names or name in self.elsewhere or name in self.meaningless or name in MEANINGLESS:
            return
        values = self.fixed.get(name, FIXED.get(name))
        if values is None:
            raise ValueError(
                f"config.json: {name!r}, which is {value!r}, is no field of a {self.model} that is known here; "
                f"remove it where it says nothing about the network"
            )
        if not any(value == each and type(value) is type(each) for each in values):
            remedy = f"a {self.model} here has {' or '.join(map(repr, values))}"
            raise ValueError(f"config.json: {name} {value!r} is not supported; {_REMEDIES.get(name, remedy)}")
