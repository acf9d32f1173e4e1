"""The layouts that inference gives for a transformer's, and the messages with which rules refuse."""

import pickle

import pytest
from weft.mesh import Layout, LayoutError, ProcessMesh, infer

GRID = ProcessMesh.grid(dp=2, tp=2)
LINE = ProcessMesh.grid(tp=2)


@pytest.mark.parametrize(
    "equation, layouts, result",
    [
        pytest.param("mk,kn->mn", ("", ""), "", id="replicated"),
        pytest.param("mk,kn->mn", ("dp: S(0)", "tp: S(1)"), "dp: S(0), tp: S(1)", id="column"),
        pytest.param("mk,kn->mn", ("dp: S(0), tp: S(1)", "tp: S(0)"), "dp: S(0), tp: P(sum)", id="row"),
        pytest.param("mk,kn->mn", ("dp: P", ""), "dp: P", id="partial-passes"),
        pytest.param("mk,kn->mn", ("tp: S(0), dp: S(0)", ""), "tp: S(0), dp: S(0)", id="order-is-kept"),
        pytest.param("mk,kn->nm", ("tp: S(0), dp: S(0)", ""), "tp: S(1), dp: S(1)", id="order-is-kept-transposed"),
        pytest.param("mk,kn->mn", ("tp: S(1), dp: S(1)", "tp: S(0), dp: S(0)"), "dp: P, tp: P", id="contracted-twice"),
    ],
)
def test_einsum_gives(equation, layouts, result):
    assert infer.einsum(equation, *(Layout(GRID, layout) for layout in layouts)) == Layout(GRID, result)


def einsum(equation, *layouts):
    return lambda: infer.einsum(equation, *(Layout(GRID, layout) for layout in layouts))


def line(layout=""):
    return Layout(LINE, layout)


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(
            einsum("mk,kn->mn", "tp: S(1)", ""),
            r"einsum 'mk,kn->mn': on axis 'tp' operands are S\(1\), R: "
            r"the axis shards dim 1 of operand 0 \('mk'\), but not dim 0 of operand 1 \('kn'\); "
            r"reshard operand 1 \('kn'\) to \(dp: R, tp: S\(0\)\)$",
            id="contracted-in-one",
        ),
        pytest.param(
            lambda: infer.einsum("mk,kn->mn", line("tp: S(1)"), line(), name="matmul", operands=("a", "b")),
            r"^matmul: on axis 'tp' operands are S\(1\), R: "
            r"the axis shards dim 1 of a, but not dim 0 of b; reshard b to \(tp: S\(0\)\)$",
            id="named",
        ),
        pytest.param(
            lambda: infer.elementwise("swiglu", False, line("tp: S(1)"), line(), operands=("gate", "up")),
            r"^swiglu: .* the axis shards dim 1 of gate, but not dim 1 of up; reshard up to \(tp: S\(1\)\)$",
            id="named-elementwise",
        ),
        pytest.param(
            einsum("mk,kn->mn", "tp: S(0)", "tp: S(1)"),
            r"the axis shards dim 0 of operand 0 \('mk'\) and dim 1 of operand 1 \('kn'\), which do not go together; "
            r"reshard operand 1 \('kn'\) to \(dp: R, tp: R\)$",
            id="two-indices",
        ),
        pytest.param(
            einsum("mk,kn->mn", "tp: P", "tp: P"),
            r"operands are P\(sum\), P\(sum\): the ranks' outputs would not reduce to the result; reshard",
            id="two-partials",
        ),
        pytest.param(
            einsum("mk,kn->mn", "", "tp: P(max)"),
            r"reshard operand 1 \('kn'\) to \(dp: R, tp: S\(1\)\)$",
            id="max",
        ),
        pytest.param(
            einsum("mk,kn->mn", "dp: S(1), tp: S(1)", "tp: S(0), dp: S(0)"),
            r"dim 0 of operand 1 \('kn'\) is cut in the order \('tp', 'dp'\), another operand in \('dp', 'tp'\); "
            r"reshard operand 1 \('kn'\) to \(dp: S\(0\), tp: S\(0\)\)$",
            id="orders",
        ),
        pytest.param(
            einsum("mk->km", "dp: P(max), tp: P"),
            r"the output would be P\(sum\) on axis 'tp' and Partial by another op on another axis; reshard",
            id="two-reductions",
        ),
        pytest.param(
            einsum("kk->k", "tp: S(0)"),
            r"the axis shards dim 0 of operand 0 \('kk'\), which is the same index as another of its dims",
            id="diagonal",
        ),
        pytest.param(einsum("mk,kn->mn", ""), "has 2 operands, got 1", id="too-few"),
        pytest.param(einsum("mk,kn", "", ""), "name each index by a letter", id="no-output"),
        pytest.param(einsum("...k,kn->...n", "", ""), "name each index by a letter", id="ellipsis"),
        pytest.param(
            einsum("mk,k->m", "", "tp: S(1)"), r"shards dim 1 of operand 1 \('k'\), which has 1 dims", id="no-such-dim"
        ),
        pytest.param(
            lambda: infer.elementwise("add", True, line(), line("tp: S(0)")),
            r"add: on axis 'tp' operands are R, S\(0\): "
            r"the axis shards dim 0 of operand 1, but not dim 0 of operand 0; reshard operand 0 to \(tp: S\(0\)\)$",
            id="add-alike",
        ),
        pytest.param(
            lambda: infer.elementwise("add", True, line("tp: P"), line()),
            r"operands are P\(sum\), R: the ranks' outputs would not reduce to the result",
            id="add-once",
        ),
        pytest.param(
            lambda: infer.elementwise("add", True, line(), line("tp: S(1)"), shapes=((4, 6), (4, 1))),
            r"a dim that is broadcast has one element, which all ranks need; "
            r"reshard operand 0 to \(tp: S\(0\)\) and operand 1",
            id="add-broadcast",
        ),
        pytest.param(
            lambda: infer.whole("rms_norm", "x", line("tp: S(1)"), 1),
            r"rms_norm: on axis 'tp' the placement is S\(1\): "
            r"rms_norm needs dim 1 of x whole; reshard x to \(tp: S\(0\)\)$",
            id="norm",
        ),
        pytest.param(
            lambda: infer.reduction("avg", line("tp: S(0)"), (5,)),
            r"avg over dims \(0,\) of \(5,\): on axis 'tp' the placement is S\(0\): "
            r"averages of parts that differ in size differ in weight",
            id="uneven-mean",
        ),
        pytest.param(
            lambda: infer.reduction("max", line("tp: S(0)"), (1,)), "a rank without elements has no max", id="empty-max"
        ),
        pytest.param(
            lambda: infer.reshape(line("tp: S(0)"), (2, 3), (3, 2)),
            r"reshape from \(2, 3\) to \(3, 2\): no layout of the new shape .* reshard the operand to \(tp: R\)$",
            id="reshape",
        ),
        pytest.param(
            lambda: infer.embedding(line("tp: S(0)"), line("tp: S(0)"), 2),
            r"the axis shards dim 0 of the tokens and dim 0 of the table, which do not go together; "
            r"reshard the table to \(tp: R\)$",
            id="embedding",
        ),
        pytest.param(
            lambda: infer.concat(0, line("tp: S(0)"), line("tp: S(0)")),
            "shards of dim 0 side by side are not a shard of the output",
            id="concat",
        ),
        pytest.param(
            lambda: infer.split(line("tp: S(0)"), 0),
            "only some ranks would hold elements of a piece of dim 0",
            id="split",
        ),
        pytest.param(
            lambda: infer.einsum("m,m->m", line(), Layout(LINE.rename(tp="pp"))), "different meshes", id="meshes"
        ),
    ],
)
def test_a_refusal_says_why_and_what_to_reshard(call, message):
    with pytest.raises(LayoutError, match=message) as refused:
        call()
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.nearest) == (str(refused.value), refused.value.nearest)


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(
            lambda: infer.reduction("norm", line(), (4,)), "no reduction 'norm'; use one of sum, avg", id="op"
        ),
        pytest.param(
            lambda: infer.reduction("sum", line(), (4,), (1,)),
            r"sum: dim 1 is not a dim of the tensor, which has 1; count",
            id="dim",
        ),
        pytest.param(lambda: infer.reduction("sum", line("tp: S(1)"), (4,)), "dim 1", id="sharded-dim"),
        pytest.param(lambda: infer.transpose(line(), (0, 0)), r"transpose: dims \(0, 0\) name a dim twice", id="dims"),
        pytest.param(lambda: infer.reshape(line(), (4,), (5,)), "4 elements are not 5", id="elements"),
        pytest.param(
            lambda: infer.gather(line(), line(), 2, 2),
            "gather: dim 2 is not a dim of the tensor, which has 2; count",
            id="gather",
        ),
        pytest.param(
            lambda: infer.whole("softmax", "x", line("tp: S(1)"), -2), "dim -2 is not a dim of", id="whole-negative"
        ),
        pytest.param(lambda: infer.split(line(), -1), "split: dim -1 is not a dim of", id="split-negative"),
        pytest.param(lambda: infer.concat(-1, line(), line()), "concat: dim -1 is not a dim of", id="concat-negative"),
        pytest.param(
            lambda: infer.reduction("sum", line(), [4], 0.5), "sum: a dim is 0.5, which is not an int", id="float-dim"
        ),
        pytest.param(lambda: infer.reshape(line(), (4,), (-1, -4)), "below 0", id="negative-size"),
        pytest.param(lambda: infer.embedding(line(), line(), -1), "below 0", id="embedding"),
        pytest.param(lambda: infer.elementwise("add", True), "no operands", id="none"),
        pytest.param(lambda: infer.concat(0), "no operands", id="concat-none"),
        pytest.param(
            lambda: infer.elementwise("add", True, line(), line(), shapes=[(4,)]), "1 shapes for 2 layouts", id="shapes"
        ),
        pytest.param(
            lambda: infer.elementwise("add", True, line(), line(), shapes=[(3,), (4,)]),
            "cannot be broadcast",
            id="broadcast",
        ),
        pytest.param(
            einsum("mk->mz", ""), "the output 'mz' must have indices of the operands, each once", id="new-index"
        ),
        pytest.param(einsum("mk->mm", ""), "the output 'mm' must have indices", id="index-twice"),
    ],
)
def test_a_bad_call_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class TestPytorch163193:
    """A scalar added to a Partial, or its max or norm, would count once per rank, or be taken before the sum."""

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(
                lambda partial: infer.elementwise("add", True, partial, line(), shapes=((4,), ())), id="scalar"
            ),
            pytest.param(lambda partial: infer.reduction("max", partial, (4,)), id="max"),
            pytest.param(lambda partial: infer.whole("norm", "x", partial, 0), id="norm"),
        ],
    )
    def test_is_refused(self, call):
        with pytest.raises(LayoutError, match="the ranks' outputs would not reduce to the result"):
            call(line("tp: P"))


def test_torchtitan_2106_a_bias_is_no_addend_of_each_rank():
    with pytest.raises(LayoutError, match=r"reshard operand 1 to \(tp: P\(sum\)\)$"):
        infer.elementwise("bias", True, line("tp: P"), line(), shapes=((8, 4), (4,)))


def test_lists_and_many_operands_are_taken():
    assert infer.reduction("sum", line("tp: S(0)"), [4, 5], [0]) == line("tp: P")
    assert infer.transpose(line("tp: S(0)"), [1, 0]) == line("tp: S(1)")
    assert infer.reshape(line("tp: S(0)"), [4, 6], [24]) == line("tp: S(0)")
    assert infer.whole("norm", "x", line("tp: S(0)"), [1, 2]) == line("tp: S(0)")
    many = [line("tp: S(0)")] * 60
    assert infer.elementwise("add", True, *many, shapes=[(8, 4, 4, 4)] * 60) == line("tp: S(0)")
    with pytest.raises(LayoutError, match=r"reshard operand 0 to .* and 56 more$"):
        infer.concat(0, *many)


def test_meshes_that_print_alike_are_told_apart():
    first, second = (ProcessMesh([0, 5, *range(10, 28), last], ["tp"]) for last in (30, 31))
    with pytest.raises(LayoutError, match=f"{first.digest[:8]} and .* {second.digest[:8]};"):
        infer.concat(0, Layout(first), Layout(second))


def test_each_operand_has_a_name():
    with pytest.raises(ValueError, match="matmul: 1 names for 2 operands; give one for each"):
        infer.einsum("mk,kn->mn", line(), line(), name="matmul", operands=("a",))
    with pytest.raises(ValueError, match="add: 1 names for 2 layouts; give one for each operand"):
        infer.elementwise("add", True, line(), line(), operands=("x",))
