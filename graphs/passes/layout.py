"""Images with their channels last, as the kernels take them."""

from __future__ import annotations

from dataclasses import replace

from maxvision.graphs.backend import Backend
from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.views import View

IMAGES = ("conv2d", "batch_norm", "max_pool2d", "avg_pool2d")
"""The ops that take images in either layout."""
TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
ANY_LAYOUT = ("relu", "gelu")
"""Ops that compute each number by itself."""


def channels_last(program: Program, _: Backend) -> Program:
    """Computes images as [N, H, W, C]; permutes and reshapes that come to nothing go.

    Values are looked at through views: a permute or a reshape makes no node by itself, but changes
    the view, and only what an op reads in the end is laid out.
    """
    return _Layout(program).run()


class _Layout:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self.seen: dict[str, tuple[str, View]] = {}  # value -> what holds its numbers, and how
        self.made: dict[tuple[str, View], str] = {}  # what was laid out already
        self.names = set(program.types)

    def run(self) -> Program:
        for node in self.program.nodes:
            self.place(node)
        outputs = {name: self.read(value) for name, value in self.program.outputs.items()}
        return rebuilt(self.program, self.nodes, outputs=outputs, known=False)

    def place(self, node: Node) -> None:
        """Puts a node down, or notes what it does to the view."""
        if node.at_load or node.op in ("permute", "reshape"):
            if node.at_load:
                self.nodes.append(node)
                return
            source, view = self.view(node.inputs[0])
            after = (
                view.permuted(node.attributes["axes"])  # type: ignore[arg-type]
                if node.op == "permute"
                else view.reshaped(node.attributes["shape"])  # type: ignore[arg-type]
            )
            if after is None:
                self.nodes.append(replace(node, inputs=(self.read(node.inputs[0]),)))
            else:
                self.seen[node.output] = (source, after)
        elif node.op in IMAGES and node.attributes.get("layout", "NCHW") == "NCHW":
            images = {0, 3} if node.op == "conv2d" else {0}  # a residual too
            inputs = tuple(
                self.read(value, TO_LAST if i in images else None) if value else ""
                for i, value in enumerate(node.inputs)
            )
            self.nodes.append(replace(node.with_attributes(layout="NHWC"), inputs=inputs))
            n, c, h, w = self.program.types[node.output].shape
            self.seen[node.output] = (node.output, View.of((n, h, w, c)).permuted(TO_FIRST))
        elif node.op in ANY_LAYOUT:
            source, view = self.view(node.inputs[0])
            self.elementwise(node, (source,), view)
        elif node.op == "add" and self.same_shapes(node):
            self.add(node)
        else:
            inputs = tuple(self.read(value) if value else "" for value in node.inputs)
            self.nodes.append(replace(node, inputs=inputs))

    def same_shapes(self, node: Node) -> bool:
        a, b = (self.program.types[value].shape for value in node.inputs)
        return a == b

    def add(self, node: Node) -> None:
        """Adds two values where the first one that is permuted lies, and the other beside it."""
        views = [self.view(value) for value in node.inputs]
        permuted = [view for _, view in views if not view.keeps_order]
        if not permuted:
            inputs = tuple(self.read(value) for value in node.inputs)
            self.nodes.append(replace(node, inputs=inputs))
            return
        view, back = permuted[0], permuted[0].inverse()
        found = [(source, each.then(back)) for source, each in views]
        if any(each is None for _, each in found):
            inputs = tuple(self.read(value) for value in node.inputs)
            self.nodes.append(replace(node, inputs=inputs))
            return
        inputs = tuple(self.lay(source, each) for source, each in found if each)
        self.elementwise(node, inputs, view)

    def elementwise(self, node: Node, inputs: tuple[str, ...], view: View) -> None:
        """Computes each number where it lies."""
        self.nodes.append(replace(node, inputs=inputs))
        self.seen[node.output] = (node.output, view)

    def view(self, value: str) -> tuple[str, View]:
        return self.seen.get(value) or (value, View.of(self.program.types[value].shape))

    def read(self, value: str, axes: tuple[int, ...] | None = None) -> str:
        """Lays a value out as the program has it, or with its axes permuted."""
        source, view = self.view(value)
        return self.lay(source, view.permuted(axes) if axes else view)

    def lay(self, source: str, view: View) -> str:
        """Lays out what a view shows: by a reshape, a permute, or one and the other."""
        if view.is_identity:
            return source
        if (source, view) in self.made:
            return self.made[source, view]
        first, axes, shape = view.steps()
        name, held = source, view.source_shape
        if view.keeps_order:
            first, axes = shape, tuple(range(len(shape)))
        if first != held:
            name = self.emit("reshape", name, shape=first)
        if axes != tuple(range(len(axes))):
            name, first = self.emit("permute", name, axes=axes), tuple(first[a] for a in axes)
        if first != shape:
            name = self.emit("reshape", name, shape=shape)
        self.made[source, view] = name
        return name

    def emit(self, op: str, value: str, **attributes: tuple[int | str, ...]) -> str:
        name = self.free(f"{value}.{op}")
        self.nodes.append(Node(op, (value,), (name,), attributes))
        return name

    def free(self, name: str) -> str:
        base, number = name, 1
        while name in self.names:
            number += 1
            name = f"{base}_{number}"
        self.names.add(name)
        return name
