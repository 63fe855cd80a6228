"""Images with their channels last, as the kernels take them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from max.dtype import DType

from maxvision.graphs.arrange import is_aligned
from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import ELEMENTWISE, MOST_PARTS, REDUCTIONS
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, rebuilt
from maxvision.graphs.shapes import MOST_AXES
from maxvision.graphs.types import split
from maxvision.graphs.views import View

IMAGES = {
    "conv2d": {0, 3},  # a residual too
    "conv2d_input_grad": {0},
    "conv2d_weight_grad": {0, 1},
    "batch_norm": {0},
    "max_pool2d": {0},
    "avg_pool2d": {0},
    "max_pool2d_grad": {0, 1},
    "avg_pool2d_grad": {0},
    "group_norm": {0},
}
"""The ops that take images in either layout, and which inputs are images."""
FILTERS = ("conv2d", "conv2d_input_grad")
"""Those of them that read a filter, which may be computed."""
LAST = (0, 2, 3, 1)
"""How images and filters are permuted to have their channels last."""
TURNED = (0, 2, 1)
"""How tokens [N, T, C] are transposed, and back."""
ROWS = 64
"""Rows, an image, from which on a matrix [K, N] is transposed for their product on Hopper."""
ALONG_AXES = ("slice", "concat", "pad", "roll", "cumsum", *REDUCTIONS)
"""Ops that name axes, and do the same wherever these lie."""


def channels_last(program: Program, on: Backend) -> Program:
    """Computes images as [N, H, W, C]; permutes and reshapes that come to nothing go.

    Values are looked at through views: a permute or a reshape makes no node by itself, but changes
    the view, and only what an op reads in the end is laid out. A view of more axes than a permute
    takes is laid out before it grows.

    On Hopper, linear layers of transposed tokens, as in MLP-Mixer, multiply them where they lie.
    Matrices [K, N] that are values, as weights are in training, are transposed there if many rows
    are multiplied by them.
    """
    return _Layout(program, on).run()


def views(program: Program, on: Backend) -> Program:
    """Makes of permutes and reshapes in a row one permute at most, between two reshapes."""
    return _Views(program, on).run()


def concats(program: Program, _: Backend) -> Program:
    """Puts what is new behind what stands together already, as in a dense block.

    Each layer of DenseNet (Huang et al. 2017, arXiv:1608.06993) reads all that came before: dozens
    of inputs, of which all but the last are one value by then. As many as one launch takes stay as
    they are: what only one expression reads is never written (``elementwise.concat_pointwise``). So
    few values are read as those that stand together: one that is, or else the longest.
    """
    rewrite = Rewrite(program)
    together: dict[tuple[Attribute, tuple[str, ...]], str] = {}
    read: set[tuple[Attribute, tuple[str, ...]]] = set()
    for node in program.nodes:
        if node.op != "concat" or node.at_load or "expression" in node.attributes:
            continue
        axis, parts = node.attributes["axis"], node.inputs
        if len(parts) > MOST_PARTS:
            ends = [i for i in range(len(parts) - 1, 1, -1) if (axis, parts[:i]) in together]
            near = [i for i in ends if len(parts) - i < MOST_PARTS and (axis, parts[:i]) in read]
            for end in (near or ends)[:1]:
                first = together[axis, parts[:end]]
                read.add((axis, parts[:end]))
                rewrite.replace([node], replace(node, inputs=(first, *parts[end:])))
        together.setdefault((axis, parts), node.output)
    return rewrite.done()


class _Layout:
    def __init__(self, program: Program, on: Backend) -> None:
        self.program = program
        self.on = on
        self.nodes: list[Node] = []
        self.seen: dict[str, tuple[str, View]] = {}  # value -> what holds its numbers, and how
        self.made: dict[tuple[str, View], str] = {}  # what was laid out already
        self.names = set(program.types)
        self.constants = set(program.constants)

    def run(self) -> Program:
        for node in self.program.nodes:
            self.place(node)
        outputs = {name: self.read(value) for name, value in self.program.outputs.items()}
        return rebuilt(self.program, self.nodes, outputs=outputs, known=False)

    def place(self, node: Node) -> None:
        """Puts a node down, or notes what it does to the view."""
        if node.at_load:
            self.nodes.append(node)
        elif node.op in ("permute", "reshape"):
            source, view = self.view(node.inputs[0])
            after = (
                view.permuted(node.attributes["axes"])  # type: ignore[arg-type]
                if node.op == "permute"
                else view.reshaped(node.attributes["shape"])  # type: ignore[arg-type]
            )
            if after is None or len(after.steps()[1]) > MOST_AXES:
                self.nodes.append(replace(node, inputs=(self.read(node.inputs[0]),)))
            else:
                self.seen[node.output] = (source, after)
        elif node.op in IMAGES and node.attributes.get("layout", "NCHW") == "NCHW":
            images = IMAGES[node.op]
            n, c, *size = self.program.types[node.output].shape
            last = 1 + len(size)
            to_last, to_first = (0, *range(2, last + 1), 1), (0, last, *range(1, last))
            filter = node.inputs[1] if node.op in FILTERS else ""
            computed = filter if filter not in self.constants else ""
            inputs = tuple(
                self.read(value, to_last if i in images else None)
                if value and value != computed
                else value
                for i, value in enumerate(node.inputs)
            )
            node = replace(node.with_attributes(layout="NHWC"), inputs=inputs)
            self.nodes.append(self.with_filter(node) if computed else node)
            self.seen[node.output] = (node.output, View.of((n, *size, c)).permuted(to_first))
        elif not (
            (node.op == "layer_norm" and self.of_pixels(node))
            or (node.op == "linear" and self.along_tokens(node))
            or (node.op == "matmul" and self.transposed(node))
            or (node.op in (*ELEMENTWISE, "pointwise", "cast") and self.elementwise(node))
            or (
                node.op in ALONG_AXES
                and "expression" not in node.attributes  # which reads vectors of the last axis
                and self.along_axes(node)
            )
        ):
            self.keep(node)

    def with_filter(self, node: Node) -> Node:
        """Reads a filter that is computed where it lies, be it [F, C, R, S] or [F, R, S, C]."""
        value = node.inputs[1]
        view = self.view(value)[1].permuted(LAST)
        if view.keeps_order:
            node = node.with_attributes(filter_layout="NHWC")
            value = self.read(value, LAST)
        else:
            value = self.read(value)
        return replace(node, inputs=(node.inputs[0], value, *node.inputs[2:]))

    def keep(self, node: Node) -> None:
        """Puts a node down that reads values as the program has them."""
        inputs = tuple(self.read(value) if value else "" for value in node.inputs)
        self.nodes.append(replace(node, inputs=inputs))

    def of_pixels(self, node: Node) -> bool:
        """Norms the pixels of an image as an image, where tokens are made of it for that."""
        source, view = self.view(node.inputs[0])
        held = view.source_shape
        maker = next((each for each in reversed(self.nodes) if source in each.outputs), None)
        if (
            maker is None
            or maker.op not in IMAGES
            or not view.keeps_order
            or held[-1] != view.shape[-1]
        ):
            return False
        self.nodes.append(replace(node, inputs=(source, *node.inputs[1:])))
        self.seen[node.output] = (node.output, view)
        return True

    def along_tokens(self, node: Node) -> bool:
        """Multiplies tokens that are transposed for it where they lie."""
        program, shape = self.program, self.program.types[node.inputs[0]].shape
        weights = tuple(filter(None, node.inputs[1:]))
        view = self.view(node.inputs[0])[1]
        if (
            not self.on.is_hopper
            or DType[node.dtype or self.on.dtype].size_in_bytes != 2
            or not program.constants.issuperset(weights)
            or any(layer in self.on.formats for layer in node.layers)
            or len(shape) != 3
            or not isinstance(shape[1], int)
            or shape[1] % 8
            or view.keeps_order
            or not view.permuted(TURNED).keeps_order
        ):
            return False
        (f, t), name = program.shape(node.inputs[1]), node.inputs[1]
        if t % 8:
            name = self.emit("pad", name, pads=(0, 0, 0, -t % 8))
        inputs = (self.read(node.inputs[0], TURNED), name, *node.inputs[2:])
        self.nodes.append(replace(node, op="token_linear", inputs=inputs))
        n, c, _ = shape
        self.seen[node.output] = (node.output, View.of((n, f, c)).permuted(TURNED))
        return True

    def transposed(self, node: Node) -> bool:
        """Multiplies by matrices that are transposed for it where they lie.

        What a transposed matrix [M, K] is the left side of is the gradient of a layer's weights. A
        matrix [K, N] by which Hopper multiplies many rows, as in the gradient of a layer's input,
        is transposed: its kernels read [N, K].
        """
        (a, b), rest = node.inputs[:2], node.inputs[2:]
        shapes = [self.program.types[value].shape for value in (a, b)]
        if node.attributes.get("transpose_b"):
            return False
        if len(shapes[0]) == len(shapes[1]) == 2 and set(node.attributes) <= {"alpha"}:
            (f, m), c = shapes[0], shapes[1][1]
            if self.is_transposed(a) and not any(rest) and "alpha" not in node.attributes:
                (dy, turned), (x, plain) = self.view(a), self.view(b)
                number, batch = split(m)
                images = (
                    turned.permuted((1, 0)).reshaped((batch or 1, number, 1, f)),
                    plain.reshaped((batch or 1, number, 1, c)),
                )
                assert images[0] is not None and images[1] is not None
                dy, x = self.lay(dy, images[0]), self.lay(x, images[1])
                name = self.free(f"{node.output}.grad")
                window: dict[str, Attribute] = {"kernel": 1, "layout": "NHWC"}
                self.nodes.append(Node("conv2d_weight_grad", (x, dy), (name,), window))
                held = View.of((f, 1, 1, c)).reshaped((f, c))
                assert held is not None
                self.seen[node.output] = (name, held)
                return True
        if not self.is_transposed(b) and not self.transposing_pays(a, b):
            return False
        swapped = (*range(len(shapes[1]) - 2), len(shapes[1]) - 1, len(shapes[1]) - 2)
        inputs = (self.read(a), self.read(b, swapped), *(self.read(v) if v else "" for v in rest))
        self.nodes.append(replace(node.with_attributes(transpose_b=True), inputs=inputs))
        return True

    def transposing_pays(self, a: str, b: str) -> bool:
        """Tells whether a product is faster if its second matrix is transposed to [N, K] first."""
        (*rows, _), (sizes, dtype) = self.program.types[a].shape, self.program.types[b]
        if not self.on.is_hopper or len(sizes) != 2 or "float" not in dtype:
            return False
        if not all(isinstance(size, int) for size in sizes):
            return False
        many = math.prod(split(size)[0] for size in rows) >= ROWS
        return many and is_aligned((1, 1, *sizes), DType[dtype])  # type: ignore[arg-type]

    def is_transposed(self, value: str) -> bool:
        """Tells whether a value lies in memory with its last two axes swapped."""
        view = self.view(value)[1]
        rank = len(view.shape)
        if rank < 2 or view.keeps_order:
            return False
        return view.permuted((*range(rank - 2), rank - 1, rank - 2)).keeps_order

    def elementwise(self, node: Node) -> bool:
        """Computes each number where it lies: in the layout that most values have.

        The others are laid out beside it; those that broadcast get its axes. On a tie channels last
        wins over the program's own layout, and that over axes that are cut up, as windows are: what
        comes next reads the image whole.
        """
        shape = self.program.types[node.output].shape
        views = [self.view(value) for value in node.inputs]
        whole = [
            each
            for value, each in zip(node.inputs, views, strict=True)
            if self.program.types[value].shape == shape
        ]

        def cost(layout: View) -> tuple[int, bool]:
            """Counts the values that have to be permuted for a layout, and says if it cuts axes."""
            back = layout.inverse()
            moved = [(source, each.then(back)) for source, each in whole]
            free = sum(bool(m and (m.keeps_order or (s, m) in self.made)) for s, m in moved)
            return len(whole) - free, layout.axes is None

        permuted = [view.divided() for _, view in whole if not view.keeps_order]
        if len(views) == 1:
            permuted = [views[0][1].divided()]
        if not permuted:
            return False
        view = min(permuted, key=cost)
        if len(views) > 1 and cost(View.of(shape)) < cost(view):
            return False
        back, axes = view.inverse(), view.axes
        found: list[tuple[str, View]] = []
        for value, (source, each) in zip(node.inputs, views, strict=True):
            held = self.program.types[value].shape
            moved: View | None = None
            if held == shape:
                moved = each.then(back)
            elif axes is not None:
                full = each.reshaped((*(1 for _ in range(len(shape) - len(held))), *held))
                moved = full and full.permuted([axes.index(a) for a in range(len(axes))])
            if moved is None:
                return False
            found.append((source, moved))
        inputs = tuple(self.lay(source, each) for source, each in found)
        self.nodes.append(replace(node, inputs=inputs))
        self.seen[node.output] = (node.output, view)
        return True

    def along_axes(self, node: Node) -> bool:
        """Cuts, joins, pads, turns and reduces images along the axes as they lie there."""
        views = [self.view(value) for value in node.inputs]
        permuted = [view.divided().axes for _, view in views if not view.keeps_order]
        if not permuted or permuted[0] is None:
            return False
        axes = permuted[0]
        back = [axes.index(a) for a in range(len(axes))]
        inputs = tuple(self.lay(source, each.permuted(back)) for source, each in views)
        attributes = dict(node.attributes)
        given: Any = node.attributes
        if "axis" in given:
            attributes["axis"] = axes[given["axis"]]
        if node.op in REDUCTIONS:
            attributes["axes"] = tuple(sorted(axes[a] for a in given["axes"]))
            attributes["keepdim"] = True
        if node.op == "roll":
            turns = sorted(zip((axes[a] for a in given["axes"]), given["shifts"], strict=True))
            attributes["axes"], attributes["shifts"] = zip(*turns, strict=True)
        if "pads" in given:
            attributes["pads"] = tuple(n for a in back for n in given["pads"][2 * a : 2 * a + 2])
        self.nodes.append(replace(node, inputs=inputs, attributes=attributes))
        shape = list(self.program.types[node.output].shape)
        full = shape
        if node.op in REDUCTIONS:
            held = self.program.types[node.inputs[0]].shape
            full = [1 if a in given["axes"] else size for a, size in enumerate(held)]
        view = View.of([full[a] for a in back]).permuted(axes)
        seen = view.reshaped(shape)
        assert seen is not None
        self.seen[node.output] = (node.output, seen)
        return True

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
        at_load = value in self.constants
        self.nodes.append(Node(op, (value,), (name,), attributes, at_load=at_load))
        if at_load:
            self.constants.add(name)
        return name

    def free(self, name: str) -> str:
        base, number = name, 1
        while name in self.names:
            number += 1
            name = f"{base}_{number}"
        self.names.add(name)
        return name


class _Views(_Layout):
    """Lays every value out as the program has it."""

    def place(self, node: Node) -> None:
        if node.at_load or node.op in ("permute", "reshape"):
            super().place(node)
        else:
            self.keep(node)
