"""What is read off a program: its layers, their sizes and partners, its multiplications."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from max.dtype import DType

from maxvision.graphs.arrange import WIDE_CHAINS
from maxvision.graphs.program import Node, Program
from maxvision.graphs.shapes import pair
from maxvision.graphs.types import at_batch, split


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer over tokens as one of 1 x 1.

    Attributes:
        name: Of its weights, without ``.weight``.
        kernel: R and S.
        stride: Pixels between windows.
        channels: Of the input.
        filters: Channels of the output.
        size: Of the output, P and Q; tokens are a row.
        groups: Groups of channels.
        partner: Another layer that the same op computes with it on a device, or nothing.
    """

    name: str
    kernel: int
    stride: int
    channels: int
    filters: int
    size: tuple[int, int]
    groups: int = 1
    partner: str = ""

    @property
    def pixels(self) -> int:
        """Counts the pixels of the output."""
        return self.size[0] * self.size[1]

    @property
    def weights(self) -> int:
        """Counts its weights."""
        return self.kernel**2 * self.channels // self.groups * self.filters

    @property
    def macs(self) -> int:
        """Counts the multiply-accumulates of one image."""
        return self.pixels * self.weights

    def title(self) -> str:
        """Describes it as bench/layers.py does: window, channels, pixels."""
        channels = f"{self.channels}-{self.filters}"
        if self.channels == self.filters:
            channels = str(self.channels)
        return f"{self.kernel}x{self.kernel}/{self.stride} {channels} at {self.pixels} px"


def layers(program: Program, final: Program | None = None) -> list[Layer]:
    """Lists every convolution and linear layer of a plain program, in its order.

    Args:
        program: The plain one.
        final: The program as it is rewritten for a device; it says which layers are partners.
    """
    partners = _partners(final) if final else {}
    found = (_layer(program, node) for node in program.nodes if node.op in ("conv2d", "linear"))
    return [replace(each, partner=partners.get(each.name, "")) for each in found if each]


def _layer(program: Program, node: Node) -> Layer | None:
    """Describes a node; None if its weights are computed from activations."""
    if node.inputs[1] not in program.constants:
        return None
    x, weight = _image(program, node.inputs[0]), program.shape(node.inputs[1])
    if node.op == "linear":
        *rows, channels = x
        return Layer(node.name, 1, 1, channels, weight[0], (1, math.prod(rows)))
    *_, p, q = _image(program, node.output)
    stride, _ = pair(node.attributes.get("stride", 1))
    groups = int(node.attributes.get("groups", 1))  # type: ignore[arg-type]
    return Layer(node.name, weight[2], stride, x[1], weight[0], (p, q), groups)


def _image(program: Program, value: str) -> tuple[int, ...]:
    """Gives the shape of a value for one image; without a named size the first is the batch."""
    first, *rest = program.types[value].shape
    named = not all(isinstance(size, int) for size in (first, *rest))
    return tuple(at_batch(size, 1) for size in (first if named else 1, *rest))


def _partners(final: Program) -> dict[str, str]:
    """Ties layers that run as one. A wide chain does so at large batches alone, and ties none."""
    found: dict[str, str] = {}
    for node in final.nodes:
        if node.op.endswith(("conv2d_shortcut", "conv2d_chain", "conv2d_shortcut_chain")):
            first, second, *_ = node.layers
            if node.op != "conv2d_chain" or _widths(final, node) not in WIDE_CHAINS:
                found |= {first: second, second: first}
    return found


def _widths(program: Program, chain: Node) -> tuple[int, int]:
    """Counts the channels that go into a chain, and those that come out."""
    return program.shape(chain.inputs[1])[1], program.shape(chain.inputs[4])[0]


def macs(program: Program) -> int:
    """Counts the multiply-accumulates of one image.

    Convolutions and their gradients, linear layers, products, attention's two and the five of its
    gradients count; norms, activations, pooling and softmax do not, as in torch's FlopCounterMode
    (which counts two FLOPs for each).
    """
    total = sum(each.macs for each in layers(program))
    for node in program.nodes:
        if node.op == "scaled_dot_product_attention":
            *rows, depth = _image(program, node.inputs[0])
            *_, keys, width = _image(program, node.inputs[2])
            total += math.prod(rows) * keys * (depth + width)
        if node.op in ("attention", "attention_grad"):
            _, keys, _ = _image(program, node.inputs[1])
            products = 2 if node.op == "attention" else 5
            total += products * math.prod(_image(program, node.inputs[0])) * keys
        if node.op == "matmul":
            total += math.prod(_image(program, node.output)) * _image(program, node.inputs[0])[-1]
        if node.op in _COMPUTED and node.inputs[1] not in program.constants:
            result, weight = _COMPUTED[node.op]
            pixels = math.prod(_image(program, (*node.inputs, node.output)[result]))
            window = _image(program, (*node.inputs, node.output)[weight])[1:]
            total += pixels * math.prod(window)
    return total


_COMPUTED = {"conv2d": (-1, 1), "conv2d_input_grad": (0, 1), "conv2d_weight_grad": (1, -1)}
"""Convolutions whose filter is no weight, and their gradients: where the result or what stands for
it is among the inputs and the output, and where the filter."""


def bytes_at_once(program: Program) -> int:
    """Counts the bytes of one image that a node reads and computes, of the node with the most."""

    def size(value: str) -> int:
        kind = program.types[value]
        if not any(split(each)[1] for each in kind.shape):
            return 0  # a weight
        return math.prod(at_batch(each, 1) for each in kind.shape) * DType[kind.dtype].size_in_bytes

    nodes = [{*node.inputs, *node.outputs} - {""} for node in program.nodes if not node.at_load]
    return max((sum(map(size, values)) for values in nodes), default=0)


def keeps_images_apart(program: Program) -> bool:
    """Tells whether no op brings values of different images together.

    Rows that stand before the batch may be merged with it, as of tokens [T, N, C] for a linear
    layer, if they are divided again. After ``x.repeat(T, 1)`` alone row i is of image i modulo N,
    and beside one that counts images first, values of several meet: what such a model gives for an
    image hangs on the others of its batch, and it has to run whole.
    """
    merged: dict[str, int] = {}  # rows that the axis of the batch holds before each image

    def rows(value: str) -> tuple[int, int]:
        """Gives the product of the sizes before the batch, and the number in the batch's own."""
        shape = program.types[value].shape
        place = next(i for i, size in enumerate(shape) if isinstance(size, str))
        before = math.prod(size for size in shape[:place] if isinstance(size, int))
        return before, split(shape[place])[0]

    for node in program.nodes:
        inputs, outputs = (
            [x for x in names if x and any(isinstance(s, str) for s in program.types[x].shape)]
            for names in (node.inputs, node.outputs)
        )
        if inputs and len(outputs) < len(node.outputs):
            return False  # a sum over all images
        counts = {merged.get(x, 1) for x in inputs}
        if len(counts) > 1:
            return False
        count = max(counts, default=1)
        for value in outputs:
            if node.op == "reshape":
                before, number = rows(value)
                count, rest = divmod(count * rows(node.inputs[0])[0], before)
                if rest or number % count:
                    return False
            merged[value] = count
    return all(merged.get(value, 1) == 1 for value in program.outputs.values())
