"""Programs as text and as JSON, their parts, and what mistakes get."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxvision.common.errors import ArgumentError, ModelError, UserError
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.cvt import CVTS
from maxvision.graphs.net import Net, Value
from maxvision.graphs.passes import PASSES
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Node, Program, Rewrite, made, rebuilt
from maxvision.graphs.resnet import RESNETS
from maxvision.graphs.types import BATCH, Type
from maxvision.weights.family import known
from tests.graphs import nets

SEEDED = settings(derandomize=True, deadline=None)


def small(net: Net, x: Value) -> None:
    with net.at("block"):
        y = net.conv2d(x, "conv", 4, 3, stride=2, padding=1, bias=False)
        y = net.relu(net.batch_norm(y, "norm"))
    net.output("maps", y)
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(y)), "head", 2))


SMALL = nets.program(small, 3, 8, 8)
TEXT = """\
program net(x: float32[batch, 3, 8, 8])
  block.conv = conv2d(x, block.conv.weight, stride=2, padding=1, groups=1)  # float32[batch, 4, 4, 4]
  block.norm = batch_norm(block.conv, block.norm.weight, block.norm.bias, block.norm.mean, block.norm.var, eps=1e-05)  # float32[batch, 4, 4, 4]
  block.relu = relu(block.norm)  # float32[batch, 4, 4, 4]
  avg_pool2d = avg_pool2d(block.relu, kernel=4x4, stride=4x4, padding=0)  # float32[batch, 4, 1, 1]
  reshape = reshape(avg_pool2d, shape=batchx4)  # float32[batch, 4]
  head = linear(reshape, head.weight, head.bias)  # float32[batch, 2]
  return maps=block.relu, logits=head"""  # noqa: E501


def test_repr_is_a_line() -> None:
    assert repr(SMALL) == (
        "Program('net', x float32[batch, 3, 8, 8] -> maps float32[batch, 4, 4, 4],"
        " logits float32[batch, 2], 6 ops)"
    )


def networks() -> dict[str, Program]:
    """Writes ResNet-50 and CvT-13 down, and every step of their way to a device."""
    found = {}
    for family, spec in (("resnet", RESNETS["resnet50"]), ("cvt", CVTS["cvt-13"])):
        program = known()[family].program(spec, (224, 224))
        found[family] = program
        program = from_pixels(program, "uint8", "bfloat16")
        for name, rewrite in PASSES.items():
            program = rewrite(program, Backend("cuda", "bfloat16"))
            found[f"{family} behind {name}"] = program
    return found


NETWORKS = networks()


# --- text ----------------------------------------------------------------------------------------


def test_a_program_prints_a_line_an_op() -> None:
    assert str(SMALL) == TEXT


def test_it_prints_what_is_absent_what_runs_at_load_and_where_it_came_from() -> None:
    nodes = (
        Node("relu", ("w",), ("v",), at_load=True),
        Node("conv2d", ("x", "v", "", "x"), ("y",), {"epilogue": "add"}, origin="net.py:7"),
    )
    weights = {"w": Type((3, 3, 1, 1))}
    program = made("net", {"x": Type((BATCH, 3, 2, 2))}, weights, nodes, {"y": "y"})
    assert str(program).splitlines()[1:] == [
        "  v = relu(w)  # float32[3, 3, 1, 1]; at load",
        "  y = conv2d(x, v, -, x, epilogue=add)  # float32[batch, 3, 2, 2]; net.py:7",
        "  return y",
    ]


@pytest.mark.parametrize("name", ["resnet", "cvt", "cvt behind mlp"])
def test_a_network_prints_an_op_a_line(name: str) -> None:
    lines = str(NETWORKS[name]).splitlines()
    assert len(lines) == len(NETWORKS[name].nodes) + 2
    assert all(line.count("  #") == 1 for line in lines[1:-1])


def test_the_difference_is_the_first_line_that_differs() -> None:
    assert SMALL.difference(SMALL) == ""
    nodes = list(SMALL.nodes)
    nodes[2] = replace(nodes[2], op="gelu")
    assert SMALL.difference(rebuilt(SMALL, nodes)) == (
        "line 4: block.relu = relu(block.norm)  # float32[batch, 4, 4, 4]"
        " is not block.relu = gelu(block.norm)  # float32[batch, 4, 4, 4]"
    )
    shorter = SMALL.keep(["maps"])
    assert SMALL.difference(shorter).startswith("line 5: avg_pool2d = ")
    assert shorter.difference(SMALL).startswith("line 5: return maps=block.relu is not avg_pool2d")
    unnamed = [replace(node, layers=()) for node in SMALL.nodes]
    assert SMALL.difference(rebuilt(SMALL, unnamed)) == "the weights or the layers differ"


# --- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_json_keeps_everything(name: str) -> None:
    program = NETWORKS[name]
    text = program.to_json()
    found = Program.from_json(text)
    assert found.difference(program) == "" and found == program
    assert found.to_json() == text
    assert Program.from_json(text.encode()) == program


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"x"', "{}", SMALL.to_json()[:-10], '{"program": "x"}']
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"^the program cannot be read \("):
        Program.from_json(text)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        found += leaves(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]
    return found


WHOLE = json.loads(nets.program(*[nets.NETS["vit"][0], *nets.NETS["vit"][1]]).to_json())
JUNK = st.sampled_from(
    [None, "", "x", "batch", 0, -1, 7, 1.5, True, [], {}, [[]], ["x"], [None], {"a": 1}, [3, "x"]]
)


@SEEDED
@given(st.sampled_from(leaves(WHOLE)), JUNK, st.booleans())
def test_broken_programs_are_refused_in_a_sentence(
    path: tuple[Any, ...], junk: Any, gone: bool
) -> None:
    tree = copy.deepcopy(WHOLE)
    place = tree
    for key in path[:-1]:
        place = place[key]
    if gone:
        del place[path[-1]]
    else:
        place[path[-1]] = junk
    try:
        found = Program.from_json(json.dumps(tree))
    except UserError as problem:
        assert str(problem)
    else:
        str(found)


# --- mistakes ------------------------------------------------------------------------------------


def of(*nodes: Node, outputs: dict[str, str] | None = None) -> Program:
    inputs, weights = {"x": Type((BATCH, 3, 4, 4))}, {"w": Type((3,))}
    return made("net", inputs, weights, nodes, outputs or {"y": "y"})


def test_mistakes_name_the_op() -> None:
    with pytest.raises(ModelError, match=r"^net: y reads 'z', which is not there$"):
        of(Node("relu", ("z",), ("y",)))
    with pytest.raises(ModelError, match=r"^net: a.b reads 'y', which is not there$"):
        of(Node("relu", ("y",), ("z",), layers=("a.b",)), Node("relu", ("x",), ("y",)))
    with pytest.raises(ModelError, match=r"^net: x gives 'x', which is there already$"):
        of(Node("relu", ("x",), ("x",)))
    with pytest.raises(ModelError, match=r"^net: y gives 'y', which is there already$"):
        of(Node("relu", ("x",), ("y",)), Node("gelu", ("x",), ("y",)))
    with pytest.raises(ModelError, match=r"^net: no op gives the outputs z$"):
        of(Node("relu", ("x",), ("y",)), outputs={"y": "y", "z": "z"})
    with pytest.raises(ArgumentError, match=r"^swish: there is no such op; graphs/shapes"):
        of(Node("swish", ("x",), ("y",)))
    with pytest.raises(ArgumentError, match=r"^relu: does not take float32\[batch.*, float32\[3\]"):
        of(Node("relu", ("x", "w"), ("y",)))
    with pytest.raises(ArgumentError, match=r"^conv2d: does not take"):
        of(Node("conv2d", ("x",), ("y",), {"stride": 1}))


def test_a_size_that_is_not_known_is_said() -> None:
    program = made("net", {"x": Type((BATCH, "tokens", 4))}, {}, [Node("relu", ("x",), ("y",))],
                   {"y": "y"})  # fmt: skip
    assert SMALL.shape("head.weight") == (2, 4) and SMALL.shape("block.relu") == (4, 4, 4)
    with pytest.raises(ModelError, match=r"^net: y float32\[batch, tokens, 4\] has no known size"):
        program.shape("y")


# --- parts ---------------------------------------------------------------------------------------


def test_what_nothing_needs_is_dropped() -> None:
    maps = SMALL.keep(["maps"])
    assert [node.output for node in maps.nodes] == ["block.conv", "block.norm", "block.relu"]
    assert list(maps.outputs) == ["maps"] and list(maps.inputs) == ["x"]
    assert set(maps.weights) == {name for name in SMALL.weights if name.startswith("block.")}
    assert set(maps.types) == {"x", *maps.weights, *(node.output for node in maps.nodes)}
    assert list(SMALL.keep(["logits", "maps"]).outputs) == ["logits", "maps"]
    assert SMALL.keep(SMALL.outputs) == SMALL


def test_an_input_that_nothing_reads_stays() -> None:
    net = Net("net")
    x, _ = net.input("x", (BATCH, 2)), net.input("unused", (BATCH, 2))
    net.output("y", net.relu(x))
    assert list(net.program().inputs) == ["x", "unused"]


def test_inputs_of_another_dtype_change_what_follows() -> None:
    other = SMALL.retyped({"x": "bfloat16"})
    assert {other.types[node.output].dtype for node in other.nodes} == {"bfloat16"}
    assert other.inputs == {"x": Type((BATCH, 3, 8, 8), "bfloat16")}
    assert other.weights == SMALL.weights
    assert other.retyped({"x": "float32"}) == SMALL == SMALL.retyped({})


def test_layers_are_kept_in_float32() -> None:
    net = Net("net")
    x = net.input("x", (BATCH, 4))
    for name in ("a.first", "a.second", "b"):
        x = net.relu(net.linear(x, name, 4))
    net.output("y", x)
    program = net.program().kept(["a"])
    assert [node.dtype for node in program.nodes] == ["float32", "", "float32", "", "", ""]
    assert Program.from_json(program.to_json()) == program and "; in float32" in str(program)
    assert program.retyped({}) == program  # nothing is narrower

    half = program.retyped({"x": "bfloat16"})
    assert [node.op for node in half.nodes] == [
        "cast", "linear", "cast", "relu", "cast", "linear", "cast", "relu", "linear", "relu",
    ]  # fmt: skip
    kinds = [half.types[node.output].dtype for node in half.nodes if node.op != "cast"]
    assert kinds == ["float32", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"]

    ops = [node.op for node in net.program().kept(["*"]).retyped({"x": "bfloat16"}).nodes]
    assert ops.count("cast") == 2 and ops[0] == ops[-1] == "cast"
    with pytest.raises(ArgumentError, match=r"no layer 'a.frist' to keep; did you mean a.first\?"):
        program.kept(["b", "a.frist"])


def test_a_value_knows_who_gives_and_who_reads_it() -> None:
    net = Net("net")
    x = net.input("x", (BATCH, 2))
    y = net.relu(x)
    z = net.add(y, y)
    net.output("z", z)
    program = net.program()
    relu, add = program.nodes
    assert program.producers == {"relu": relu, "add": add}
    assert program.users == {"x": (relu,), "relu": (add,)}
    assert program.only_user("relu") is add and program.only_user("add") is None
    net.output("y", y)
    assert net.program().only_user("relu") is None


def test_names_tell_layers_and_repeats_apart() -> None:
    net = Net("net")
    x = net.input("x", (BATCH, 4, 6, 6))
    with net.at("stages"), net.at(0):
        y = net.conv2d(x, "conv", 4, 3, padding=1)
        y = net.conv2d(y, "conv", 4, 3, padding=1)
        net.output("maps", y)
    net.output("y", net.relu(net.relu(y)))
    program = net.program()
    assert [node.output for node in program.nodes] == [
        "stages.0.conv", "stages.0.conv_2", "relu", "relu_2",
    ]  # fmt: skip
    assert [node.layers for node in program.nodes] == [("stages.0.conv",)] * 2 + [()] * 2
    assert [node.name for node in program.nodes[:3]] == ["stages.0.conv", "stages.0.conv", "relu"]
    assert list(program.weights) == ["stages.0.conv.weight", "stages.0.conv.bias"]
    assert list(program.outputs) == ["stages.0.maps", "y"]


def test_what_runs_at_load_comes_first() -> None:
    net = Net("net")
    x = net.input("x", (BATCH, 4))
    y = net.relu(x) + net.relu(net.weight("w", 4))
    net.output("y", y)
    program = passes.run(net.program(), Backend("cpu", "float32"))
    assert [(node.output, node.at_load) for node in program.nodes] == [
        ("relu_2", True), ("add", False),
    ]  # fmt: skip
    assert program.constants == {"w", "relu_2"}


def test_rewrites_stand_in_the_place_of_the_last_and_keep_the_origin() -> None:
    nodes = [replace(node, origin=f"line {i}") for i, node in enumerate(SMALL.nodes)]
    program = rebuilt(SMALL, nodes)
    conv, norm, relu = program.nodes[:3]
    rewrite = Rewrite(program)
    assert rewrite.done() is program and not rewrite.has(conv, norm)
    rewrite.replace([norm, relu], Node("gelu", (conv.output,), relu.outputs))
    assert rewrite.has(conv, norm) and not rewrite.has(conv)
    after = rewrite.done()
    assert [node.op for node in after.nodes[:2]] == ["conv2d", "gelu"]
    assert after.nodes[1].origin == "line 1"
    assert not any(name.startswith("block.norm") for name in after.types)
