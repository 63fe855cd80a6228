"""Networks as ONNX files, for the runtimes beside ours.

In the file of a quantised program each ``fake_quantize`` is a QuantizeLinear and a DequantizeLinear
(QDQ); weights are int8 with a DequantizeLinear, after batch norms were folded into them. So all
engines multiply the same integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from maxvision.bench.torchnet import TorchNet
from maxvision.common.errors import ArgumentError
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import Constants
from maxvision.graphs.passes.eight_bit import filter_steps
from maxvision.graphs.program import Attribute, Node, Program, free, rebuilt
from maxvision.graphs.quantize import Float8, Grid

FOLDS = ("constants", "batch_norm", "bias")
"""The passes that run before a program is written."""
OPSET = 17
"""Of a file of integers."""


def is_quantised(program: Program) -> bool:
    """Tells whether a program rounds values to 8 bits."""
    return any(node.op == "fake_quantize" for node in program.nodes)


def unrounded(program: Program) -> Program:
    """Gives a quantised program that bounds what it rounded, and rounds nothing.

    The bounds stay: where 0 is the least level, they take the place of a ReLU.
    """
    nodes = []
    for node in program.nodes:
        if node.op == "fake_quantize":
            if floats := Float8.read(node):
                least, largest = floats.bounds
            else:
                scale, low, high = (float(node.attributes[n]) for n in ("scale", "low", "high"))  # type: ignore[arg-type]
                least, largest = scale * low, scale * high
            bounds: dict[str, Attribute] = {"min": least, "max": largest}
            node = replace(node, op="clamp", attributes=bounds)
        nodes.append(node)
    names = {n.output: n.inputs[0] for n in nodes if n.op == "fake_quantize_filter"}
    kept = [node for node in nodes if node.output not in names]
    return rebuilt(
        program,
        [replace(n, inputs=tuple(names.get(value, value) for value in n.inputs)) for n in kept],
    )


def write(
    path: Path, network: torch.nn.Module, x: torch.Tensor, *, every_sum: bool = False
) -> None:
    """Writes an ONNX file; the package onnx has to be there.

    Args:
        path: Where to.
        network: What gives logits, as models of transformers do.
        x: Its input; the file is for this shape.
        every_sum: Whether the result of each convolution of integers is rounded, also if it is
            added to something first: onnxruntime has no other one. The levels are chosen by ``x``.

    Raises:
        ArgumentError: If the network rounds to floats of 8 bits.
    """
    quantised = isinstance(network, TorchNet) and is_quantised(network.source.program)
    if isinstance(network, TorchNet) and any(map(Float8.read, network.source.program.nodes)):
        raise ArgumentError(
            f"{network.source.program.name} rounds to float8_e4m3fn, which no engine for ONNX files"
            " multiplies on a CPU; compare it with torch"
        )
    if isinstance(network, TorchNet) and quantised:
        folded, held, scales = _folded(*network.source)
        if every_sum:
            folded = _with_sums(folded, held, scales, x)
        network = _Integers(folded, held, scales)
    with torch.no_grad():
        torch.onnx.export(
            Logits(network).eval(),
            (x,),
            str(path),
            dynamo=False,  # the exporter that needs no further package
            input_names=["x"],
            output_names=["logits"],
            opset_version=OPSET if quantised else None,
        )
    if quantised:
        _store_integers(path)


class Logits(torch.nn.Module):
    """A network that gives its logits alone, as an exporter wants it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        """Computes the logits of x[N, C, H, W]."""
        return self.module(x).logits


class _Rounded(torch.nn.Module):
    """Rounds a weight [F, ...] to int8."""

    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, scale: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("scale", torch.from_numpy(np.abs(scale).astype(np.float32)))
        self.register_buffer("zero", torch.zeros(len(scale), dtype=torch.int32))

    def forward(self, weight: torch.Tensor) -> Any:
        return torch.fake_quantize_per_channel_affine(weight, self.scale, self.zero, 0, -128, 127)


class _Integers(TorchNet):
    """A network whose roundings torch's exporter knows."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, np.ndarray],
        scales: Mapping[str, np.ndarray],
    ) -> None:
        self._scales = scales
        super().__init__(program, tensors)

    def layer(
        self, program: Program, node: Node, tensors: Mapping[str, np.ndarray]
    ) -> torch.nn.Module | None:
        made = super().layer(program, node, tensors)
        if made is not None and len(node.inputs) > 1 and node.inputs[1] in self._scales:
            rounding = _Rounded(self._scales[node.inputs[1]])
            parametrize.register_parametrization(made, "weight", rounding, unsafe=True)
        return made

    def function(self, node: Node) -> Callable[..., torch.Tensor]:
        grid = Grid.read(node)
        if grid is None:
            return super().function(node)
        scale, low = grid
        return lambda x: torch.fake_quantize_per_tensor_affine(x, scale, -low, 0, 255)


def _folded(
    program: Program, tensors: Mapping[str, np.ndarray]
) -> tuple[Program, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Folds what is known into weights; gives these too, and the scales of those in 8 bits."""
    off = passes.PASSES.keys() - set(FOLDS)
    final = passes.run(program, Backend("cpu", "float32"), off)
    constants = Constants(final, tensors)
    nodes = [node for node in final.nodes if not node.at_load]
    read = {value for node in nodes for value in node.inputs if value in final.constants}
    held = {value: np.asarray(constants[value]) for value in read}
    scales = {}
    for node in nodes:
        if node.op in ("conv2d", "linear") and node.inputs[1] in read:
            weight = node.inputs[1]
            found = filter_steps(final, constants, weight)
            if found is not None:
                scales[weight] = found
    weights = {value: final.types[value] for value in read}
    return rebuilt(final, nodes, weights=weights), held, scales


def _with_sums(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    scales: Mapping[str, np.ndarray],
    x: torch.Tensor,
) -> Program:
    """Rounds the results of convolutions that are not rounded, to what they are of ``x``."""
    net = TorchNet(program, tensors).eval()
    grids: dict[str, Grid] = {}
    for i, node in enumerate(program.nodes):
        if node.op == "conv2d" and node.inputs[1] in scales and not _is_rounded(program, node):

            def see(_: Any, __: Any, y: torch.Tensor, name: str = node.output) -> None:
                grids[name] = Grid.of(float(y.min()), float(y.max()))

            net.get_submodule(str(i)).register_forward_hook(see)
    with torch.no_grad():
        net(x)
    taken, nodes, names = set(program.types), list[Node](), dict[str, str]()
    for node in program.nodes:
        nodes.append(replace(node, inputs=tuple(names.get(v, v) for v in node.inputs)))
        if grid := grids.get(node.output):
            names[node.output] = free(taken, f"{node.output}.rounded")
            to = (names[node.output],)
            nodes.append(Node("fake_quantize", (node.output,), to, grid.attributes))
    return rebuilt(program, nodes)


def _is_rounded(program: Program, node: Node) -> bool:
    """Tells whether a result is rounded at once, but for an activation that only bounds it."""
    user = program.only_user(node.output)
    while user is not None and user.op in ("relu", "clamp"):
        user = program.only_user(user.output)
    return user is not None and user.op == "fake_quantize"


def _store_integers(path: Path) -> None:
    """Rounds the weights of a file, where torch's exporter leaves that to whoever loads it."""
    import onnx
    from onnx import numpy_helper

    file = onnx.load(path)
    held = {each.name: each for each in file.graph.initializer}
    constants = {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in file.graph.node
        if node.op_type == "Constant"
    }

    def value(name: str) -> np.ndarray:
        return numpy_helper.to_array(held[name]) if name in held else constants[name]

    for node in list(file.graph.node):
        if node.op_type != "QuantizeLinear" or node.input[0] not in held:
            continue
        weight, scale = (value(name) for name in node.input[:2])
        by_filter = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        whole = np.clip(np.rint(weight / by_filter), -128, 127).astype(np.int8)
        made = numpy_helper.from_array(whole, node.output[0])
        file.graph.initializer.append(made)
        file.graph.initializer.remove(held.pop(node.input[0]))
        file.graph.node.remove(node)
    onnx.save(file, path)
