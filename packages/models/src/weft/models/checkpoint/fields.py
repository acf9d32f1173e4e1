"""The terms in which a family's weights.py states its Hugging Face format: fields of config.json, and stored tensors.

`Fields`: which fields of config.json Weft reads, checks, saves unchanged, or ignores. `Stored`: where files store a
parameter, by tensor name, part and orientation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..safe_files import as_type, types_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Fields about the file itself and about running the model, without effect on the network. Weft saves none.
_NO_EFFECT = frozenset(
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
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
    ]
)

# Fields about the tokenizer, generation, and tasks besides next-token prediction: attached to the model by
# `attach_companions`, and saved unchanged.
COMPANIONS = frozenset(
    [
        "_num_labels",
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
# Types of the companion fields with a use in Weft.
_COMPANION_TYPES: Mapping[str, Any] = dict.fromkeys(
    ("bos_token_id", "eos_token_id", "pad_token_id"), int | tuple[int, ...] | None
)
IGNORED = _NO_EFFECT | COMPANIONS  # not read into any config

# Fields supported only with the listed values, in every family. An entry of `Fields.fixed` replaces the entry here.
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
    """Reads and writes the fields of config.json for a model_type, by tables. Made by the family's `weights` module.

    A field outside these tables, FIXED and IGNORED is an error.
    """

    model: str  # the model's name in errors
    config: type[ModelConfig]  # the family's config class, with annotated types of the fields
    names: Mapping[str, str]  # Hugging Face's name of a field -> the name in our config
    required: Collection[str]  # keys of `names` without which config.json is refused
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' defaults, where different from ours
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # name -> supported values; the first is written
    read_by_family: Collection[str] = ()  # fields read by the family's `weights` module itself
    ignored: Collection[str] = ()  # the family's fields without effect on the network
    # Keys of `names` for sizes that may be null, as head_dim: transformers and our config then derive the size
    # from further sizes. A size of 0 is an error. For keys of `names` not listed here, null is an error.
    nullable: Collection[str] = ()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The values for our config, by our names. config: the content of config.json.

        A field missing from config.json gets the value in `defaults`. Absent from the result: missing fields
        without a default, and null fields.
        Raises ValueError for a required field missing or null, and for a field unknown, null without being
        `nullable`, of the wrong type, or of an unsupported value.
        """
        for name in self.required:
            if config.get(name) is None:
                raise ValueError(f"config.json has no {name!r}; a {self.model} needs {', '.join(self.required)}")
        for name, value in config.items():
            self._check(name, value)
        values = {**self.defaults, **config}
        return {own_name: values[name] for name, own_name in self.names.items() if values.get(name) is not None}

    def write(self, config: object) -> dict[str, Any]:
        """The fields of config.json for a config of ours, without the `read_by_family` fields."""
        written = {name: getattr(config, own_name) for name, own_name in self.names.items()}
        fixed = {name: values[0] for name, values in self.fixed.items()}
        # Written as null: for an absent id, transformers would assume a default of its own. `Companions.in_config`
        # replaces these nulls by the ids of a model with companions.
        return {**fixed, **written, "bos_token_id": None, "eos_token_id": None}

    def _check(self, name: str, value: Any) -> None:
        if name in self.nullable and value == 0:
            raise ValueError(
                f"config.json: {name} is {value!r}; give a size, or null for the size that follows from the others"
            )
        if value is None and name in self.names and name not in self.nullable:
            raise ValueError(
                f"config.json: {name} is null; give the value that the model was trained with, or remove "
                f"the field for the default"
            )
        if name in self.names and value is not None:
            as_type(types_of(self.config)[self.names[name]], value, f"config.json: {name}")
        if name in _COMPANION_TYPES:
            as_type(_COMPANION_TYPES[name], value, f"config.json: {name}")
        if name in self.names or name in self.read_by_family or name in self.ignored or name in IGNORED:
            return
        values = self.fixed.get(name, FIXED.get(name))
        if values is None:
            raise ValueError(
                f"config.json: {name!r}, which is {value!r}, is not a known field of a {self.model}; "
                f"remove the field if it does not affect the network"
            )
        if not any(value == each and type(value) is type(each) for each in values):
            remedy = f"a {self.model} here has {' or '.join(map(repr, values))}"
            raise ValueError(f"config.json: {name} {value!r} is not supported; {_REMEDIES.get(name, remedy)}")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter's values are in Hugging Face's files. Made by a family's `weights.stored`.

    Several parameters may share a stored tensor, like GPT-2's q, k and v, joined along the parameters' first dim.
    """

    name: str  # of the stored tensor
    part: int = 0  # the parameter's place among the parameters that share the stored tensor
    parts: int = 1  # the number of parameters that share the stored tensor
    transposed: bool = False  # whether the file stores the transpose
    # Whether the parameter is a stack of experts' matrices, and the file has a tensor for each expert. `name` then has
    # "{}" in place of the expert's number.
    stacked: bool = False

    def names(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The names of the stored tensors: a single name, or for a stack a name by expert. shape: the parameter's."""
        return tuple(self.name.format(i) for i in range(shape[0])) if self.stacked else (self.name,)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored tensor; for a stack, of each expert's. shape: the parameter's."""
        if self.stacked:
            return shape[1:]
        whole = (shape[0] * self.parts, *shape[1:])
        return whole[::-1] if self.transposed else whole

    def slices(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The stored tensor's slices with the values of the parameter's `slices`. shape: the parameter's. No stack."""
        first, *further = slices
        start = self.part * shape[0]
        found = (slice(start + first.start, start + first.stop), *further)
        return found[::-1] if self.transposed else found

    def place(self, whole: Tensor) -> Tensor:
        """The view of a stored tensor `whole` into which the parameter's values are written. No stack."""
        own = whole.mT if self.transposed else whole
        size = own.shape[0] // self.parts
        return own[self.part * size : (self.part + 1) * size]

    def to_parameter_orientation(self, read: Tensor) -> Tensor:
        """Values read from the stored tensor, transposed into the parameter's orientation if necessary."""
        return read.mT.contiguous() if self.transposed else read


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Stored tensors written together: a tensor with the parameters sharing the tensor, or all tensors of a stack."""

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]

    def values(self, stored: Callable[[str], Stored], whole: Iterable[Tensor]) -> dict[str, Tensor]:
        """The stored tensors by name, from the whole parameters in order. Entries of a stack are views."""
        pairs = [(stored(name), each) for name, each in zip(self.parameters, whole, strict=True)]
        if pairs[0][0].stacked:
            return dict(zip(self.tensors, pairs[0][1].unbind(), strict=False))
        return {self.tensors[0]: join_parameters(pairs)}


@dataclass(frozen=True, slots=True)
class Repeats:
    """The values required of a stored tensor without a parameter: equal to `tensor`, or accepted by `accepts`.

    Files of Hugging Face may hold tensors besides the parameters: a tied head, a causal mask, rotary frequencies.
    Made by a family's `weights.repetition` for `check_tensors`, which also accepts a tensor of zeros.
    """

    # The error is "{name of the stored tensor} is not {what}; {remedy}".
    what: str
    remedy: str
    tensor: str | None = None  # the name of another stored tensor
    accepts: Callable[[Tensor], bool] = bool  # called only without `tensor`


def tied_head(embedding: str) -> Repeats:
    """The values required of a stored head where embeddings are tied: equal to the table named `embedding`."""
    return Repeats(
        what=f"{embedding}, though config.json ties them by tie_word_embeddings",
        remedy="set tie_word_embeddings to false in config.json to keep this head, or remove the tensor to drop it",
        tensor=embedding,
    )


def join_parameters(parts: Iterable[tuple[Stored, Tensor]]) -> Tensor:
    """Join all parameters of a stored tensor, given in any order.

    The dtype is the narrowest to hold the values of all parameters without rounding.
    """
    pairs = list(parts)
    first, tensor = pairs[0]
    assert sorted(stored.part for stored, _ in pairs) == list(range(first.parts)), "every part is given once"
    if first.parts == 1 and not first.transposed:
        return tensor
    whole = tensor.new_empty(first.shape(tuple(tensor.shape)), dtype=common_dtype([each.dtype for _, each in pairs]))
    for stored, tensor in pairs:
        stored.place(whole).copy_(tensor)
    return whole


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype to which all of `dtypes` convert without rounding."""
    from torch import promote_types

    return reduce(promote_types, dtypes)


def group_by_stored_tensor(shapes: Mapping[str, tuple[int, ...]], stored: Callable[[str], Stored]) -> list[StoredGroup]:
    """The stored tensors of parameters, in order of their first parameters. shapes: of the parameters, by name."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault(stored(name).names(shape), []).append(name)
    return [StoredGroup(tensors, tuple(parameters)) for tensors, parameters in groups.items()]
