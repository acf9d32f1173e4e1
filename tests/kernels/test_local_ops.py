"""The local computation of each op, against torch's own functions in float64."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels.attention import function as attention
from weft.kernels.dispatch.op import Op
from weft.kernels.dispatch.sharded import apply
from weft.kernels.layer_norm import function as layer_norms
from weft.kernels.matmul import function as products
from weft.kernels.plain import sharded as elementwise
from weft.kernels.rms_norm import function as rms_norms
from weft.kernels.rope import function as rope
from weft.kernels.swiglu import function as swiglu


def plain(function):
    """The plain functions of an op's function.py."""
    names = ("forward", "backward", "inference")
    found = {name: getattr(function, f"plain_{name}") for name in names if hasattr(function, f"plain_{name}")}
    return SimpleNamespace(__name__=function.__name__, **found)


matmul = SimpleNamespace(__name__=products.__name__, forward=products.linear, backward=products.linear_backward)
gelu = SimpleNamespace(__name__="gelu.function", forward=swiglu.gelu_forward, backward=swiglu.gelu_backward)
norm, layer_norm = plain(rms_norms), plain(layer_norms)


def op(room):
    return Op(f"{room.__name__.split('.')[-2]} alone", room.forward, getattr(room, "backward", None), rule=None)


def normal(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def rms_norm(x, weight, eps=1e-5):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rms_norm_of_heads(x, weight, head_dim=4):
    """Qwen 3's form: the heads in a dim of their own."""
    return rms_norm(x.unflatten(-1, (x.shape[-1] // head_dim, head_dim)), weight).flatten(-2)


def torch_layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotate(x, cos, sin):
    """Hugging Face's form, with tables repeated over both halves and a rotated copy."""
    D = 2 * cos.shape[-1]
    heads = x.unflatten(-1, (-1 if x.numel() else 1, D)).transpose(-3, -2)  # [..., heads, T, D]
    half = torch.cat((-heads[..., D // 2 :], heads[..., : D // 2]), -1)
    cos, sin = (torch.cat((t, t), -1).to(x.dtype).unsqueeze(-3) for t in (cos, sin))  # [..., 1, T, D]
    turned = heads * cos + half * sin
    return turned.transpose(-3, -2).flatten(-2)


def attend(query, key, value, head_dim, causal=True, scale=None):
    """Attention written out, with its scores."""
    q, k, v = (x.unflatten(-1, (x.shape[-1] // head_dim, head_dim)).transpose(-3, -2) for x in (query, key, value))
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = q @ k.mT * (head_dim**-0.5 if scale is None else scale)  # [..., heads, T, S]
    T, S = scores.shape[-2:]
    if causal:
        scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -float("inf"))
    return (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)


def angles(T, half):
    angle = torch.outer(torch.arange(T).float(), 10000 ** (-torch.arange(half).float() / half))
    return angle.cos(), angle.sin()


# id, room, tensors, options, oracle
CASES = [
    ("linear", matmul, [normal(2, 5, 3), normal(7, 3), normal(7)], {}, F.linear),
    ("linear-no-bias", matmul, [normal(6, 3), normal(4, 3), None], {}, F.linear),
    ("linear-vector", matmul, [normal(3), normal(4, 3), normal(4)], {}, F.linear),
    ("linear-no-rows", matmul, [normal(0, 5, 3), normal(4, 3), normal(4)], {}, F.linear),
    ("linear-no-columns", matmul, [normal(2, 3), normal(0, 3), normal(0)], {}, F.linear),
    ("linear-nothing-to-sum", matmul, [normal(2, 0), normal(4, 0), normal(4)], {}, F.linear),
    ("rms_norm", norm, [normal(2, 5, 7), normal(7)], {"eps": 1e-5}, rms_norm),
    ("rms_norm-vector", norm, [normal(7), normal(7)], {"eps": 1e-5}, rms_norm),
    ("rms_norm-size-one", norm, [normal(1, 1), normal(1)], {"eps": 1e-5}, rms_norm),
    ("rms_norm-no-rows", norm, [normal(3, 0, 7), normal(7)], {"eps": 1e-5}, rms_norm),
    ("rms_norm-heads", norm, [normal(2, 5, 12), normal(4)], {"eps": 1e-5, "head_dim": 4}, rms_norm_of_heads),
    ("rms_norm-no-heads", norm, [normal(2, 5, 0), normal(4)], {"eps": 1e-5, "head_dim": 4}, rms_norm_of_heads),
    ("layer_norm", layer_norm, [normal(2, 5, 7), normal(7), normal(7, seed=1)], {"eps": 1e-5}, torch_layer_norm),
    ("layer_norm-no-bias", layer_norm, [normal(2, 5, 7), normal(7), None], {"eps": 1e-5}, torch_layer_norm),
    ("layer_norm-bias-alone", layer_norm, [normal(2, 5, 7), None, normal(7)], {"eps": 1e-5}, torch_layer_norm),
    ("layer_norm-x-alone", layer_norm, [normal(2, 5, 7), None, None], {"eps": 0.5}, partial(torch_layer_norm, eps=0.5)),
    ("layer_norm-vector", layer_norm, [normal(7), normal(7), normal(7)], {"eps": 1e-5}, torch_layer_norm),
    ("layer_norm-size-one", layer_norm, [normal(1, 1), normal(1), normal(1)], {"eps": 1e-5}, torch_layer_norm),
    ("layer_norm-no-rows", layer_norm, [normal(3, 0, 7), normal(7), normal(7)], {"eps": 1e-5}, torch_layer_norm),
    ("rope", rope, [normal(2, 5, 3 * 6), *angles(5, 3)], {}, rotate),
    ("rope-rows", rope, [normal(2, 5, 3 * 6), *(torch.stack((t, t.flip(0))) for t in angles(5, 3))], {}, rotate),
    ("rope-no-batch", rope, [normal(5, 2), *angles(5, 1)], {}, rotate),
    ("rope-no-tokens", rope, [normal(2, 0, 6), *angles(0, 3)], {}, rotate),
    ("swiglu", swiglu, [normal(3, 5, 7), normal(3, 5, 7, seed=1)], {}, lambda gate, up: F.silu(gate) * up),
    ("swiglu-empty", swiglu, [normal(3, 0), normal(3, 0)], {}, lambda gate, up: F.silu(gate) * up),
    ("gelu", gelu, [normal(3, 5, 7)], {}, F.gelu),
    ("gelu-tanh", gelu, [normal(3, 5, 7)], {"approximate": "tanh"}, partial(F.gelu, approximate="tanh")),
    ("gelu-empty", gelu, [normal(3, 0)], {}, F.gelu),
    ("add", elementwise, [normal(3, 5, 7), normal(3, 5, 7, seed=1)], {}, torch.add),
    ("add-empty", elementwise, [normal(0, 7), normal(0, 7)], {}, torch.add),
    ("add-repeated", elementwise, [normal(3, 2, 5, 7), normal(5, 7)], {"num_missing": 2}, torch.add),
    ("add-repeated-no-rows", elementwise, [normal(0, 5, 7), normal(5, 7)], {"num_missing": 1}, torch.add),
]


def attention_case(B, T, S, heads, kv_heads, D, **options):
    tensors = [normal(*B, T, heads * D), normal(*B, S, kv_heads * D, seed=1), normal(*B, S, kv_heads * D, seed=2)]
    options = {"head_dim": D, **options}
    return attention, tensors, options, lambda *t: attend(*t, **options)


CASES += [
    ("attention", *attention_case([2], 7, 7, 4, 4, 6)),
    ("attention-grouped", *attention_case([2], 7, 7, 6, 2, 5)),
    ("attention-one-kv-head", *attention_case([], 5, 5, 3, 1, 4)),
    ("attention-two-batch-dims", *attention_case([2, 3], 4, 4, 2, 1, 4)),
    ("attention-one-token", *attention_case([2], 1, 1, 2, 1, 4)),
    ("attention-cached-one-query", *attention_case([2], 1, 9, 4, 2, 4)),
    ("attention-cached", *attention_case([2], 3, 9, 4, 2, 4)),
    ("attention-not-causal", *attention_case([2], 6, 4, 4, 2, 4, causal=False)),
    ("attention-scaled", *attention_case([1], 5, 5, 2, 2, 4, scale=0.7)),
    ("attention-no-batch", *attention_case([0], 5, 5, 4, 2, 4)),
    ("attention-no-tokens", *attention_case([2], 0, 0, 4, 2, 4)),
]


def each_case():
    return pytest.mark.parametrize(
        ("room", "tensors", "options", "oracle"), [pytest.param(*case, id=name) for name, *case in CASES]
    )


def each_case_with_a_backward():
    """The ops with a backward of their own; torch differentiates the rest."""
    cases = [pytest.param(room, *case, id=name) for name, room, *case in CASES if hasattr(room, "backward")]
    return pytest.mark.parametrize(("room", "tensors", "options", "oracle"), cases)


def with_gradients(function, tensors, grad=None):
    """The output, and for the upstream gradient `grad` the gradient of each float64 tensor; None for the rest."""
    leaves = [t.detach().clone().requires_grad_(t.dtype == torch.float64) if t is not None else None for t in tensors]
    output = function(*leaves)
    grad = normal(*output.shape, seed=9) if grad is None else grad
    output.backward(grad)
    return output.detach(), [leaf.grad if leaf is not None else None for leaf in leaves]


@pytest.mark.every_value
@each_case()
def test_output_and_gradients_are_those_of_the_oracle(room, tensors, options, oracle):
    output, gradients = with_gradients(lambda *t: apply(op(room), *t, **options), tensors)
    expected, expected_gradients = with_gradients(oracle, tensors)
    torch.testing.assert_close(output, expected, atol=1e-6 if room is rope else 1e-12, rtol=1e-12)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6 if room is rope else 1e-12, rtol=1e-12)


@each_case()
def test_gradients_are_those_of_finite_differences(room, tensors, options, oracle):
    leaves = [t.clone().requires_grad_(t.dtype == torch.float64) if t is not None else None for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: apply(op(room), *t, **options), leaves)


@each_case_with_a_backward()
def test_backward_computes_what_is_needed_alone(room, tensors, options, oracle):
    output, saved = room.forward(*tensors, **options)
    grad = normal(*output.shape, seed=9)
    whole = room.backward(saved, grad, [t is not None for t in tensors], **options)
    for i, gradient in enumerate(whole):
        if tensors[i] is None:
            continue
        one = room.backward(saved, grad, [j == i for j in range(len(tensors))], **options)
        assert [j for j, g in enumerate(one) if g is not None] == ([i] if gradient is not None else [])
        if gradient is not None:
            assert torch.equal(one[i], gradient)
            assert gradient.shape == tensors[i].shape and gradient.dtype == tensors[i].dtype
    assert room.backward(saved, grad, [False] * len(tensors), **options) == (None,) * len(tensors)


@each_case_with_a_backward()
def test_backward_is_linear_in_the_gradient_and_takes_any_strides(room, tensors, options, oracle):
    output, saved = room.forward(*tensors, **options)
    first, second = normal(*output.shape, seed=1), normal(*output.shape, seed=2)
    needed = [t is not None for t in tensors]
    total = room.backward(saved, first + second, needed, **options)
    parts = [room.backward(saved, grad, needed, **options) for grad in (first, second)]
    for whole, one, other in zip(total, *parts, strict=True):
        if whole is not None:
            torch.testing.assert_close(whole, one + other, atol=1e-12, rtol=1e-12)
    # the gradient that sum() sends back: all strides are 0
    expanded = torch.ones((), dtype=output.dtype).expand(output.shape)
    for one, other in zip(
        room.backward(saved, expanded, needed, **options),
        room.backward(saved, expanded.contiguous(), needed, **options),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


LOW_NAMES = (
    "linear", "rms_norm", "rms_norm-heads", "layer_norm", "layer_norm-no-bias", "rope", "gelu", "gelu-tanh", "swiglu",
    "add", "add-repeated", "attention-grouped",
)  # fmt: skip
LOW = [case for case in CASES if case[0] in LOW_NAMES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("room", "tensors", "options", "oracle"), [pytest.param(*case, id=name) for name, *case in LOW]
)
def test_low_precision_errs_no_more_than_eager_torch(room, tensors, options, oracle, dtype):
    low = [t.to(dtype) if t is not None and t.dtype == torch.float64 else t for t in tensors]

    def run(function, tensors):
        leaves = [
            None if t is None else t.clone().requires_grad_(i < 1 or room is not rope) for i, t in enumerate(tensors)
        ]
        output = function(*leaves)
        assert output.dtype == tensors[0].dtype
        output.backward(normal(*output.shape, seed=9).to(dtype).to(output.dtype))
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]

    truth = run(oracle, [None if t is None else t.double() for t in low])
    eager = run(oracle, low)
    ours = run(lambda *t: apply(op(room), *t, **options), low)
    for true, other, got in zip(truth, eager, ours, strict=True):
        assert got.dtype == dtype
        allowed = 2 * (other.double() - true).abs().max() + 4 * torch.finfo(dtype).eps * true.abs().max()
        assert (got.double() - true).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("room", "tensors", "options", "oracle"),
    [pytest.param(*case, id=name) for name, *case in CASES if hasattr(case[0], "inference")],
)
def test_inference_gives_the_same_bits_as_forward(room, tensors, options, oracle, dtype):
    low = [t.to(dtype) for t in tensors]
    assert torch.equal(room.inference(*low, **options), room.forward(*low, **options)[0])


def test_without_gradients_the_inference_of_an_op_runs_alone():
    taken = []
    one = Op("recorded alone", lambda x: (taken.append("forward"), (x + 1, ()))[1], lambda *_: (None,), rule=None,
             inference=lambda x: (taken.append("inference"), x + 1)[1])  # fmt: skip
    x = normal(3).requires_grad_()
    apply(one, x)
    with torch.no_grad():
        assert torch.equal(apply(one, x), x + 1)
    assert taken == ["forward", "inference"]


def test_rms_norm_in_low_precision_is_hugging_faces_to_the_bit():
    x, weight = normal(64, 33, dtype=torch.bfloat16), normal(33, dtype=torch.bfloat16)
    assert torch.equal(norm.forward(x, weight, eps=1e-5)[0], rms_norm(x, weight))


def test_layer_norm_sums_its_weights_gradients_over_many_rows_to_the_last_bits_of_float32():
    x, weight, bias, grad = (normal(*shape, dtype=torch.float32) for shape in [(30000, 3), (3,), (3,), (30000, 3)])
    grad += 0.5  # the sums grow with the rows; plain float32 sums would be 3e-6 off
    _, saved = layer_norm.forward(x, weight, bias, eps=1e-5)
    _, dweight, dbias = layer_norm.backward(saved, grad, [False, True, True], eps=1e-5)
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    for found, truth in ((dweight, (normed * grad.double()).sum(0)), (dbias, grad.double().sum(0))):
        assert float((found - truth).abs().max() / truth.abs().max()) < 3e-7


def test_linear_bias_left_out_still_has_its_gradient():
    input, weight, bias = normal(2, 5, 3), normal(7, 3), normal(7)
    output, (dinput, dweight, dbias) = with_gradients(
        lambda *t: apply(op(matmul), *t, add_bias=False), [input, weight, bias]
    )
    expected, wanted = with_gradients(F.linear, [input, weight, bias])
    torch.testing.assert_close(output + bias, expected)
    torch.testing.assert_close([dinput, dweight, dbias], wanted)


def test_ops_keep_no_more_than_their_inputs_and_the_statistics_of_a_row():
    for room, tensors, options, statistics in [
        (matmul, [normal(5, 3), normal(4, 3), normal(4)], {}, 0),
        (norm, [normal(5, 3), normal(3)], {"eps": 1e-5}, 1),
        (norm, [normal(5, 6), normal(3)], {"eps": 1e-5, "head_dim": 3}, 2),
        (layer_norm, [normal(5, 3), normal(3), normal(3)], {"eps": 1e-5}, 2),
        (gelu, [normal(5, 3)], {}, 0),
        (swiglu, [normal(5, 3).bfloat16(), normal(5, 3).bfloat16()], {}, 0),  # in 32 bits a CPU keeps the activation
        (elementwise, [normal(5, 3), normal(5, 3)], {}, 0),
    ]:
        _, saved = room.forward(*tensors, **options)
        fresh = [s for s in saved if all(s.data_ptr() != t.data_ptr() for t in tensors)]
        assert sum(s.numel() for s in fresh) == statistics * tensors[0].shape[0]


class Calls(TorchDispatchMode):
    """Counts the calls of each of torch's operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_attention_runs_once_forward_and_once_backward():
    query, key = normal(2, 5, 8).requires_grad_(), normal(2, 5, 4, seed=1)
    with Calls() as seen:
        apply(op(attention), query, key, key, head_dim=4).sum().backward()
    attending = [name for name, count in seen.counts.items() for _ in range(count) if "attention" in name]
    assert attending == [
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    ]


@pytest.mark.parametrize(
    ("room", "shapes", "options", "message"),
    [
        pytest.param(rope, [(5, 9), (5, 3), (5, 3)], {}, r"heads \* 6", id="rope-width"),
        pytest.param(rope, [(4, 6), (5, 3), (5, 3)], {}, r"\[\.\.\., 5,", id="rope-length"),
        pytest.param(rope, [(3, 5, 6), (2, 5, 3), (2, 5, 3)], {}, r"\[\.\.\., 2, 5,", id="rope-rows"),
        pytest.param(elementwise, [(4, 6), (6,)], {}, r"a y of shape \(4, 6\), got \(6,\)", id="add"),
        pytest.param(
            elementwise,
            [(3, 4, 6), (3, 6)],
            {"num_missing": 1},
            r"a y of shape \(4, 6\), got \(3, 6\)",
            id="add-repeated",
        ),
    ],
)
def test_shapes_that_do_not_fit(room, shapes, options, message):
    with pytest.raises(ValueError, match=message):
        apply(op(room), *(normal(*shape) for shape in shapes), **options)
