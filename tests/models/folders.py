"""Random small models of `transformers` of every family, saved in folders to compare Weft's models with."""

import copy
import functools
import random
from pathlib import Path

import torch
from weft.models import from_pretrained, save_pretrained
from weft.models.families import family_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 44}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gpt2": "GPT2",
}
BASES = {
    "llama": SIZES,
    "mistral": {**SIZES, "head_dim": 8},
    "mixtral": {**SIZES, **EXPERTS, "num_local_experts": 5},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 20},
    "gpt2": GPT_SIZES,
}
BASES["weft_moe"] = {**BASES["qwen3_moe"], "router_score": "sigmoid"}  # of Weft alone


def scaling(kind, **settings):
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "default-rope": {"rope_scaling": {"rope_type": "default"}},
    "linear": scaling("linear"),
    "dynamic": {**scaling("dynamic"), "max_position_embeddings": 20},
    "dynamic-unused": scaling("dynamic", factor=2.5),
    "llama3": scaling("llama3", **LLAMA3),
    "yarn": scaling("yarn", original_max_position_embeddings=16),
    "yarn-of-max": scaling("yarn"),
    "yarn-attention-factor": scaling("yarn", original_max_position_embeddings=16, attention_factor=0.7),
    "yarn-betas": scaling("yarn", original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.5, truncate=False),
    "yarn-mscale": scaling("yarn", original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.8),
}
SHARED = {
    "plain": {},
    "one-key-head": {"num_key_value_heads": 1},
    "as-many-key-heads": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_theta": 500000.0},
    "eps": {"rms_norm_eps": 1e-3},
    "wide-heads": {"head_dim": 12},
    "narrow-heads": {"head_dim": 4},
    "one-layer": {"num_hidden_layers": 1},
    "odd-sizes": {"vocab_size": 7, "intermediate_size": 5},
    **ROPES,
}
WINDOWS = {
    "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "window-from-layer-1": {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 1},
    "window-of-no-layer": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "window-by-types": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "window-unused": {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
}
MISTRAL_WINDOWS = {
    "window": {"sliding_window": 5},
    "window-of-1": {"sliding_window": 1},
    "window-as-long-as-the-row": {"sliding_window": 33},
    "no-window": {"sliding_window": None},
}
ROUTERS = {
    "one-expert-a-token": {"num_experts_per_tok": 1},
    "three-experts-a-token": {"num_experts_per_tok": 3},
    "balance": {"router_aux_loss_coef": 0.02},
    "router-logits": {"output_router_logits": True},
}
SPARSE = {
    "normalized": {"norm_topk_prob": True},
    "every-second-layer": {"decoder_sparse_step": 2, "num_hidden_layers": 2},
    "first-layer-dense": {"mlp_only_layers": [0], "num_hidden_layers": 2},
    "second-layer-and-dense-first": {"decoder_sparse_step": 2, "mlp_only_layers": [0], "num_hidden_layers": 2},
    "no-list-of-layers": {"mlp_only_layers": None},
    "narrow-experts": {"moe_intermediate_size": 3},
    "as-many-as-chosen": {"num_experts": 3, "num_experts_per_tok": 3},
}
GPT = {
    "plain": {},
    "inner-of-4": {"n_inner": None},
    "gelu": {"activation_function": "gelu"},
    "gelu-of-torch": {"activation_function": "gelu_pytorch_tanh"},
    "untied": {"tie_word_embeddings": False},
    "eps": {"layer_norm_epsilon": 1e-2},
    "unscaled": {"scale_attn_weights": False},
    "scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True},
    "one-head": {"n_head": 1},
    "one-layer": {"n_layer": 1},
    "odd-vocabulary": {"vocab_size": 7},
    "as-many-positions": {"n_positions": 33},
    "no-dropout": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}
OPTIONS = {
    "llama": {**SHARED, "attention-biases": {"attention_bias": True}, "mlp-biases": {"mlp_bias": True}},
    "mistral": {**SHARED, **MISTRAL_WINDOWS},
    "mixtral": {
        **SHARED,
        **MISTRAL_WINDOWS,
        **ROUTERS,
        "as-many-as-chosen": {"num_local_experts": 2, "num_experts_per_tok": 2},
    },
    "qwen2": {**SHARED, **WINDOWS},
    "qwen3": {**SHARED, **WINDOWS, "attention-biases": {"attention_bias": True}},
    "qwen3_moe": {
        **SHARED,
        **ROUTERS,
        **SPARSE,
        "attention-biases": {"attention_bias": True},
        "window": {"use_sliding_window": True, "sliding_window": 5},
        "window-unused": {"use_sliding_window": False, "sliding_window": 5},
    },
    "gpt2": GPT,
}


def alone():
    """Every option of every family: (model_type, names)."""
    return [(kind, (name,)) for kind, options in OPTIONS.items() for name in options]


def pairs():
    """Every two options of a family that do not set the same field."""
    return [
        (kind, (one, two))
        for kind, options in OPTIONS.items()
        for i, one in enumerate(options)
        for two in list(options)[i + 1 :]
        if not options[one].keys() & options[two].keys() and options[one] and options[two]
    ]


def drawn(kind, number):
    """Sizes at random, and up to four options that set none of the same fields: (names, sizes)."""
    draw = random.Random(f"{kind}-{number}")
    heads = draw.choice([1, 2, 3, 4, 6])
    hidden, inside = (
        heads * 2 * draw.randint(2, 8),
        draw.randint(1, 64),
    )  # transformers divides by the size of a head less 2
    layers, vocabulary, positions = draw.randint(1, 3), draw.randint(2, 97), draw.randint(33, 80)
    if kind == "gpt2":
        sizes = {
            "vocab_size": vocabulary,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": positions,
        }
        sizes["n_inner"] = draw.choice([None, inside])
    else:
        sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inside}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": positions}
        sizes["num_key_value_heads"] = draw.choice([each for each in range(1, heads + 1) if heads % each == 0])
        sizes["head_dim"] = draw.choice([hidden // heads, 2 * draw.randint(2, 8)])
    names, fields = [], {"num_key_value_heads"}  # an option's may not divide the heads that were drawn
    for name in draw.sample(list(OPTIONS[kind]), 8):
        if len(names) < 4 and not fields & OPTIONS[kind][name].keys():
            names.append(name)
            fields |= OPTIONS[kind][name].keys()
    return tuple(names), {field: size for field, size in sizes.items() if field not in fields - {"num_key_value_heads"}}


def their_model(kind, names=(), seed=0, **options):
    """A model of transformers whose every parameter is random, biases and norms too; in eager attention."""
    import transformers  # here, as worker processes load this module too and have no use for it

    chosen = functools.reduce(lambda all_, name: {**all_, **OPTIONS[kind][name]}, names, {})
    given = copy.deepcopy({**BASES[kind], **chosen, **options})  # transformers writes into its argument
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**given, attn_implementation="eager")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def their_saved(folder: Path):
    """transformers' model of a folder, without missing or unexpected tensors."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def tokens_for(model, T=33, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, model.config.vocab_size, (2, T), generator=generator)


def close(found, wanted, what=""):
    """Within 1e-5 of the largest, or of 1."""
    error = (found - wanted).abs().max() if wanted.numel() else 0.0
    assert error <= 1e-5 * max(1.0, wanted.abs().max()), (what, float(error), float(wanted.abs().max()))


def check_agreement(kind, names, folder, *, seed=0, sharded=False, **options):
    """transformers' model and ours of its folder, and transformers' of ours: logits and every gradient are the same."""
    theirs = their_model(kind, names, seed, **options)
    theirs.save_pretrained(folder / "theirs", max_shard_size="5KB" if sharded else "5GB")
    check_saved(theirs, folder, seed=seed, sharded=sharded)


def gradient_in(gradients, place, parameter):
    """The gradient of one of our parameters, from those of transformers' model by name."""
    if place.stacked:
        of_experts = [gradients[name].grad for name in place.names(parameter.shape)]
        return torch.stack([torch.zeros(parameter.shape[1:]) if each is None else each for each in of_experts])
    their = gradients[place.name].grad
    return (their.mT if place.transposed else their).chunk(place.parts)[place.part]


def check_saved(theirs, folder, *, seed=0, sharded=False):
    """`check_agreement` for transformers' model `theirs`, saved in the folder "theirs" of `folder`."""
    ours = from_pretrained(folder / "theirs").eval()
    tokens = tokens_for(theirs, seed=seed)
    logits, wanted = ours(tokens), theirs(tokens).logits
    close(logits, wanted, "logits")
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed)) / wanted.numel() ** 0.5
    logits.backward(cotangent)
    wanted.backward(cotangent)
    stored = family_of(ours).weights.stored
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradient_in(gradients, stored(name), parameter), name)
    save_pretrained(ours, folder / "ours", shard_bytes=5_000 if sharded else 10**9)
    assert (folder / "ours" / "model.safetensors.index.json").exists() == sharded
    again = from_pretrained(folder / "ours")
    assert again.config == ours.config
    close(their_saved(folder / "ours")(tokens).logits, wanted, "logits of what was saved")
    for (name, parameter), other in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), name
