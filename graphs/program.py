"""A network as a list of ops, for whoever makes one and for whoever rewrites, compiles or reads it.

A program holds ops in the order in which they run, the shape and dtype of every value, weights by
name, the layers that each op computes and where it came from. It holds no numbers: weights stay
with the checkpoint. What makes a program is graphs/net.py; what rewrites it, graphs/passes; what
turns it into a MAX graph, graphs/lower.py. Nothing of MAX is imported here.

Plain ops are torch's: images are [N, C, H, W], filters [F, C, R, S], linear weights [out, in].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from maxvision.common.arguments import meant
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs.shapes import infer
from maxvision.graphs.types import Type

Attribute = bool | int | float | str | tuple[int | str, ...]


PRODUCTS_IN_BYTES = {
    "quantized_conv2d": 1,
    "quantized_linear": 1,
    "quantized_qkv_linear": 3,
    "quantized_conv2d_shortcut": 2,
    "quantized_conv2d_chain": 2,
    "quantized_conv2d_shortcut_chain": 3,
}
"""The ops that multiply numbers of 8 bits, and the layers of each."""


@dataclass(frozen=True)
class Node:
    """An op of a program.

    Attributes:
        op: Which one (graphs/shapes.py lists them).
        inputs: The values and weights that it reads; an optional one that is absent is "".
        outputs: The values that it gives.
        attributes: Its settings.
        layers: The layers that it computes, as the checkpoint calls them; perhaps none.
        origin: Where it came from, such as a line of a torch module; perhaps nothing.
        at_load: Whether it reads weights only, and runs once, when the model loads.
        dtype: What it computes in where the others compute in less; nothing if it does as they do.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    origin: str = ""
    at_load: bool = False
    dtype: str = ""

    @property
    def output(self) -> str:
        """The first output."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        """What to call it: its layers, or else its first output."""
        return " + ".join(self.layers) or self.output

    def with_attributes(self, **attributes: Attribute) -> Node:
        """Copies it with some attributes changed or added."""
        return replace(self, attributes={**self.attributes, **attributes})


@dataclass(frozen=True)
class Program:
    """A network, or part of one. Two programs are equal if all of this is.

    Attributes:
        name: What it is called, such as the family's name.
        inputs: The type of each input, in their order.
        weights: The type of each weight, as the checkpoint stores it.
        nodes: The ops, each behind those that it reads from.
        outputs: What each output is called, and the value that it is.
        types: Of every input, weight and value.
    """

    name: str
    inputs: Mapping[str, Type]
    weights: Mapping[str, Type]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, str]
    types: Mapping[str, Type]

    @cached_property
    def producers(self) -> dict[str, Node]:
        """The node that gives each value."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each value, each once; values that nobody reads are left out."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    @cached_property
    def constants(self) -> frozenset[str]:
        """The weights, and the values that are made of them when the model loads."""
        found = set(self.weights)
        for node in self.nodes:
            if node.at_load:
                found |= set(node.outputs)
        return frozenset(found)

    @property
    def in_bytes(self) -> int:
        """Counts the layers that multiply numbers of 8 bits."""
        return sum(PRODUCTS_IN_BYTES.get(node.op, 0) for node in self.nodes)

    def only_user(self, value: str) -> Node | None:
        """Gives the node that alone reads a value which is no output of the program."""
        users = self.users.get(value, ())
        return users[0] if len(users) == 1 and value not in self.outputs.values() else None

    def shape(self, value: str) -> tuple[int, ...]:
        """Gives the sizes of a value behind the first one, which is the batch; all of a weight."""
        shape = self.types[value].shape
        known = shape if value in self.constants else shape[1:]
        if not all(isinstance(size, int) for size in known):
            raise ModelError(f"{self.name}: {value} {self.types[value]} has no known size")
        return known  # type: ignore[return-value]

    def keep(self, outputs: Iterable[str]) -> Program:
        """Keeps some outputs and what they need."""
        kept = {name: self.outputs[name] for name in outputs}
        needed = set(kept.values())
        nodes: list[Node] = []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        names = needed.union(self.inputs, *(node.outputs for node in nodes))
        return replace(
            self,
            weights={name: each for name, each in self.weights.items() if name in needed},
            nodes=tuple(reversed(nodes)),
            outputs=kept,
            types={name: each for name, each in self.types.items() if name in names},
        )

    def kept(self, names: Iterable[str], dtype: str = "float32") -> Program:
        """Makes layers compute in ``dtype`` when the program is given a narrower one.

        Args:
            names: Layers, or the modules that they came from, with all that is inside; ``*`` stands
                for anything.
            dtype: Of their values and filters.

        Raises:
            ArgumentError: If nothing has such a name.
        """
        nodes, known = list(self.nodes), [_names(node) for node in self.nodes]
        for name in names:
            found = [
                i
                for i, each in enumerate(known)
                if any(fnmatchcase(one, name) or one.startswith(f"{name}.") for one in each)
            ]
            if not found:
                paths = [one.split(".") for each in known for one in each if one]
                words = {".".join(path[:i]) for path in paths for i in range(1, len(path) + 1)}
                near = meant(name, sorted(words))
                raise ArgumentError(f"{self.name}: there is no layer {name!r} to keep{near}")
            for i in found:
                nodes[i] = replace(nodes[i], dtype=dtype)
        return replace(self, nodes=tuple(nodes))

    def retyped(self, dtypes: Mapping[str, str]) -> Program:
        """Gives inputs other dtypes, and values those that follow."""
        inputs = {n: t._replace(dtype=dtypes.get(n, t.dtype)) for n, t in self.inputs.items()}
        return rebuilt(self, self.nodes, inputs=inputs, known=False)

    @property
    def signature(self) -> str:
        """Its name, inputs, outputs and number of ops, in a line."""
        taken = ", ".join(f"{name} {each}" for name, each in self.inputs.items())
        given = ", ".join(f"{name} {self.types[value]}" for name, value in self.outputs.items())
        return f"{self.name!r}, {taken} -> {given}, {len(self.nodes)} ops"

    def __repr__(self) -> str:
        return f"Program({self.signature})"

    def __str__(self) -> str:
        """Writes it down for a reader: a line an op."""
        inputs = ", ".join(f"{name}: {each}" for name, each in self.inputs.items())
        lines = [f"program {self.name}({inputs})"]
        for node in self.nodes:
            given = [name or "-" for name in node.inputs]
            given += [f"{name}={_short(value)}" for name, value in node.attributes.items()]
            lines.append(
                f"  {', '.join(node.outputs)} = {node.op}({', '.join(given)})"
                f"  # {', '.join(str(self.types[value]) for value in node.outputs)}"
                + ("; at load" if node.at_load else "")
                + (f"; in {node.dtype}" if node.dtype else "")
                + (f"; {node.origin}" if node.origin else "")
            )
        ends = (name if name == v else f"{name}={v}" for name, v in self.outputs.items())
        return "\n".join([*lines, f"  return {', '.join(ends)}"])

    def difference(self, other: Program) -> str:
        """Names the first line in which another program differs; nothing if it is equal."""
        ours, theirs = str(self).splitlines(), str(other).splitlines()
        for i in range(max(len(ours), len(theirs))):
            pair = [lines[i].strip() if i < len(lines) else "(ends)" for lines in (ours, theirs)]
            if pair[0] != pair[1]:
                return f"line {i + 1}: {pair[0]} is not {pair[1]}"
        return "" if self == other else "the weights or the layers differ"

    def to_json(self) -> str:
        """Writes it as JSON, an op a line."""
        nodes = ",\n  ".join(json.dumps(_node_as_json(node)) for node in self.nodes)
        head = {
            "program": self.name,
            "inputs": {name: [each.shape, each.dtype] for name, each in self.inputs.items()},
            "outputs": dict(self.outputs),
            "weights": {name: [each.shape, each.dtype] for name, each in self.weights.items()},
        }
        return f'{json.dumps(head)[:-1]},\n "nodes": [\n  {nodes}\n ]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Program:
        """Reads what ``to_json`` wrote, and checks every op as it was checked when it was made.

        Raises:
            ModelError: If it is not a program.
        """
        try:
            found = json.loads(text)
            inputs, weights = (
                {name: Type(tuple(shape), dtype) for name, (shape, dtype) in found[part].items()}
                for part in ("inputs", "weights")
            )
            nodes = tuple(_node_from_json(each) for each in found["nodes"])
            return made(found["program"], inputs, weights, nodes, dict(found["outputs"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the program cannot be read ({error!r})") from None


def made(
    name: str,
    inputs: Mapping[str, Type],
    weights: Mapping[str, Type],
    nodes: Sequence[Node],
    outputs: Mapping[str, str],
) -> Program:
    """Makes a program; the types of values are inferred.

    Raises:
        ArgumentError: If an op does not take what it is given.
        ModelError: If an op reads what is not there.
    """
    types: dict[str, Type] = {**inputs, **weights}
    for node in nodes:
        if twice := [value for value in node.outputs if value in types]:
            raise ModelError(f"{name}: {node.name} gives {twice[0]!r}, which is there already")
        _infer(name, node, types)
    if gone := [value for value in outputs.values() if value not in types]:
        raise ModelError(f"{name}: no op gives the outputs {', '.join(gone)}")
    return Program(name, dict(inputs), dict(weights), tuple(nodes), dict(outputs), types)


def _infer(name: str, node: Node, types: dict[str, Type]) -> None:
    """Adds the types of a node's outputs."""
    try:
        given = [types[value] if value else None for value in node.inputs]
    except KeyError as missing:
        raise ModelError(f"{name}: {node.name} reads {missing}, which is not there") from None
    types.update(zip(node.outputs, infer(node.op, given, node.attributes), strict=True))


def rebuilt(
    program: Program,
    nodes: Sequence[Node],
    *,
    inputs: Mapping[str, Type] | None = None,
    weights: Mapping[str, Type] | None = None,
    outputs: Mapping[str, str] | None = None,
    known: bool = True,
) -> Program:
    """Makes a program anew with some of its parts changed; what nothing needs any more goes.

    What runs when the model loads comes first.

    Args:
        program: The old one.
        nodes: The new ops.
        inputs: The new inputs; so are weights and outputs.
        weights: See ``inputs``.
        outputs: See ``inputs``.
        known: Whether values that keep their names keep their types.
    """
    ordered = sorted(nodes, key=lambda node: not node.at_load)
    given = inputs or program.inputs, weights or program.weights
    ends = outputs or program.outputs
    if known:
        types = {**program.types, **given[0], **given[1]}
        there = {"", *given[0], *given[1]}
        for node in ordered:
            if not there.issuperset(node.inputs):
                gone = ", ".join(value for value in node.inputs if value not in there)
                raise ModelError(f"{program.name}: {node.name} reads {gone}, which is not there")
            if not types.keys() >= set(node.outputs):
                _infer(program.name, node, types)
            there.update(node.outputs)
        whole = Program(program.name, *given, tuple(ordered), ends, types)
    else:
        whole = made(program.name, *given, _with_casts(program.name, *given, ordered), ends)
    return whole.keep(whole.outputs)


def _with_casts(
    name: str, inputs: Mapping[str, Type], weights: Mapping[str, Type], nodes: Sequence[Node]
) -> list[Node]:
    """Puts casts around the nodes that compute in a dtype of their own."""
    types: dict[str, Type] = {**inputs, **weights}
    constants = {*weights, *(value for node in nodes if node.at_load for value in node.outputs)}
    wide: dict[str, str] = {}  # a value, and the same as such nodes read and give it
    taken = {*types, *(value for node in nodes for value in node.outputs)}
    found: list[Node] = []

    def add(node: Node) -> None:
        _infer(name, node, types)
        found.append(node)

    for node in nodes:
        narrow = [
            value
            for value in node.inputs
            if node.dtype and value and value not in constants
            and "float" in types[value].dtype and types[value].dtype != node.dtype
        ]  # fmt: skip
        if not narrow:
            add(node)
            continue
        before = types[narrow[0]].dtype
        for value in narrow:
            if value not in wide:
                wide[value] = free(taken, f"{value}.wide")
                add(Node("cast", (value,), (wide[value],), {"dtype": node.dtype}))
        given = tuple(wide[value] if value in narrow else value for value in node.inputs)
        made_of = [types[value] if value else None for value in given]
        kinds = infer(node.op, made_of, node.attributes)
        outputs = tuple(
            free(taken, f"{value}.wide") if kind.dtype == node.dtype else value
            for value, kind in zip(node.outputs, kinds, strict=True)
        )
        add(replace(node, inputs=given, outputs=outputs))
        for value, held in zip(node.outputs, outputs, strict=True):
            if held != value:
                wide[value] = held
                add(Node("cast", (held,), (value,), {"dtype": before}))
    return found


def free(taken: set[str], name: str) -> str:
    """Takes a name that no value has; a layer that is used twice comes twice."""
    while name in taken:
        name += ".folded"
    taken.add(name)
    return name


def _names(node: Node) -> list[str]:
    """Lists a node's layers, and the module that it came from; "" is the outermost."""
    module, _, line = node.origin.partition(" (")
    return [*node.layers, module if line else ""]


def _short(value: Attribute) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "()"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _node_as_json(node: Node) -> dict[str, Any]:
    whole = {
        "op": node.op,
        "inputs": node.inputs,
        "outputs": node.outputs,
        "attributes": dict(node.attributes),
        "layers": node.layers,
        "origin": node.origin,
        "at_load": node.at_load,
        "dtype": node.dtype,
    }
    return {name: value for name, value in whole.items() if value or name in ("op", "inputs")}


def _node_from_json(found: Mapping[str, Any]) -> Node:
    attributes = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.get("attributes", {}).items()
    }
    return Node(
        found["op"],
        tuple(found["inputs"]),
        tuple(found["outputs"]),
        attributes,
        tuple(found.get("layers", ())),
        found.get("origin", ""),
        found.get("at_load", False),
        found.get("dtype", ""),
    )


class Rewrite:
    """Replaces nodes of a program by others, all at once in ``done``.

    What is new gives the values of what is old under their names and with their types, and stands
    in the place of the last of these, or of another one. No node is replaced twice.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._gone: set[str] = set()
        self._new: dict[str, list[Node]] = {}

    def has(self, *nodes: Node) -> bool:
        """Tells whether one of them is replaced already."""
        return any(node.output in self._gone for node in nodes)

    def replace(self, old: Sequence[Node], *new: Node, place: Node | None = None) -> None:
        """Replaces nodes; ``place`` is the last of ``old`` if it is left out."""
        self._gone.update(node.output for node in old)
        origin = next((node.origin for node in old if node.origin), "")
        dtype = next((node.dtype for node in old if node.dtype), "")
        new = tuple(
            replace(node, origin=node.origin or origin, dtype=node.dtype or dtype) for node in new
        )
        self._new.setdefault((place or old[-1]).output, []).extend(new)

    def done(self) -> Program:
        """Gives the new program; the old one if nothing was replaced."""
        if not self._gone:
            return self._program
        nodes: list[Node] = []
        for node in self._program.nodes:
            nodes += self._new.get(node.output, ())
            if node.output not in self._gone:
                nodes.append(node)
        return rebuilt(self._program, nodes)


def in_dtype(program: Program, dtype: str) -> Program:
    """Makes a program take and compute in ``dtype`` instead of float32, what ids look up too."""
    names = [name for name, each in program.inputs.items() if each.dtype == "float32"]
    tables = {
        node.inputs[0]: program.weights[node.inputs[0]]._replace(dtype=dtype)
        for node in program.nodes
        if node.op == "gather"
        and node.inputs[1] not in program.constants
        and node.inputs[0] in program.weights
        and program.weights[node.inputs[0]].dtype == "float32"
    }
    program = replace(program, weights={**program.weights, **tables})
    return program.retyped(dict.fromkeys(names, dtype))


def computing_in(program: Program, dtype: str) -> Program:
    """Makes a program take float32 and compute in ``dtype``; see ``in_dtype``."""
    if dtype == "float32":
        return program
    names = [name for name, each in program.inputs.items() if each.dtype == "float32"]
    inner = in_dtype(program, dtype)
    casts = [Node("cast", (f"{name}.float32",), (name,), {"dtype": dtype}) for name in names]
    inputs = {
        (f"{name}.float32" if name in names else name): program.inputs[name]
        for name in program.inputs
    }
    return rebuilt(inner, [*casts, *inner.nodes], inputs=inputs, known=False)
