"""The cases that every op must pass, on a CPU here and on a GPU by tests/gpu.py.

A case is a graph of one op and the same computation in torch. Many cases share one graph, since
a compilation costs 12 s whatever it holds; tests/ops/eager.py shares compiled ops, too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from max.driver import Buffer, Device
from max.dtype import DType
from max.graph import (
    DeviceRef,
    Graph,
    KernelLibrary,
    StaticDim,
    TensorType,
    TensorValue,
    ops,
)

from maxvision.bench.tf32 import RoundedProducts
from maxvision.graphs import nodes, passes
from maxvision.graphs.constants import Constants
from maxvision.graphs.elementwise import BETWEEN, activation, joining, values_of
from maxvision.graphs.lower import Canonical, backend, emit
from maxvision.graphs.net import Net, Value
from maxvision.graphs.parameters import Parameters, wide
from maxvision.graphs.program import Program
from maxvision.graphs.quantize import Float8, Grid, Rounding
from maxvision.graphs.shapes import sides
from maxvision.graphs.types import FLOAT8
from maxvision.runtime import cache

Shape = tuple[int, ...]
TORCH = {
    DType.float32: torch.float32,
    DType.bfloat16: torch.bfloat16,
    DType.float16: torch.float16,
    DType.float64: torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One op on one set of shapes.

    Attributes:
        name: Unique; it also seeds the random data.
        inputs: Shapes of the activations, without the batch before them.
        weights: Shapes of the parameters.
        build: Makes the op's output from Parameters and the graph's inputs.
        reference: The same from a dictionary of tensors and the tensors.
        change: Alters the random data in place.
        levels: The inputs are uint8 pixels.
        finite: NaN and infinity are not tried.
    """

    name: str
    inputs: Sequence[Shape]
    weights: dict[str, Shape]
    build: Callable[..., Any]
    reference: Callable[..., torch.Tensor]
    change: Callable[[list[np.ndarray], dict[str, np.ndarray]], None] = lambda x, w: None
    levels: bool = False
    finite: bool = False

    def data(self, batch: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Draws the activations [batch, ...] and the weights, float32."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {batch}".encode()))
        if self.levels:
            inputs = [rng.integers(0, 256, (batch, *s), np.uint8) for s in self.inputs]
        else:
            inputs = [rng.standard_normal((batch, *s)).astype(np.float32) for s in self.inputs]
        fixed = np.random.default_rng(zlib.crc32(self.name.encode()))
        weights = {
            name: (
                fixed.standard_normal(s) / max(1, np.prod(s[:-1])) ** (0.5 * (len(s) > 1))
            ).astype(np.float32)
            for name, s in self.weights.items()
        }
        self.change(inputs, weights)
        return inputs, weights


def poisoned(case: Case) -> Case:
    """Puts NaN, infinity and -infinity into all images of a case but the second.

    Each into the first, the middle and the last number of one of the inputs of an image. What is
    beside them in memory, such as the second image, has to stay as it is.
    """

    def poison(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        case.change(inputs, weights)
        batch, turn = len(inputs[0]), zlib.crc32(case.name.encode())
        for image in range(0 if case.levels or case.finite else batch):
            flat = inputs[image % len(inputs)][image].reshape(-1)
            if image != 1 and flat.size:
                flat[[0, flat.size // 2, -1]] = (np.nan, np.inf, -np.inf)[(image + turn) % 3]

    return replace(case, change=poison)


def epilogue(y: torch.Tensor, name: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Finishes the product as the fused epilogues do."""
    function = UNARY[words] if (words := activation(name)) else lambda x: x
    if joining(name) == "mul":
        return y * function(residual)
    return function(y if residual is None else y + residual)


EPILOGUES = (
    "none", "relu", "gelu", "add", "add_relu", "silu", "add_gelu", "0.0 6.0 clamp",
    "add_0.1 leaky_relu", "mul", "mul_silu", "mul_gelu_grad",
)  # fmt: skip
"""Those of products with every way of writing them."""


def quantized(
    name: str, size: tuple[int, int], c: int, f: int, kernel: int, x: Grid, result: Grid | None
) -> Case:
    """Makes a case of quantized_conv2d on uint8; without padding where 0 is another level.

    Scales are powers of 2, so that nothing rounds but the result. A result in uint8 has a residual,
    too, and is widened again.
    """
    padding = 0 if x.low else kernel // 2
    added = Grid(2.0**-4, -3)
    number = f"x0 {float(result.low)!r} add {result.scale!r} mul" if result else ""

    def build(w: Parameters, value: Any, *residual: Any) -> Any:
        filter, product, scales = w.quantized(
            "w.filter", "w.bias", 1, x, added if result else None, result
        )
        y = nodes.quantized_conv2d(
            value,
            filter,
            product,
            scales=scales,
            dtype="uint8" if result else w.dtype.name,
            padding=padding,
            epilogue="add" if result else "relu",
            residual=next(iter(residual), None),
        )
        return nodes.pointwise(number, [y], w.dtype.name) if result else y

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, *residual: torch.Tensor
    ) -> torch.Tensor:
        images = ((value + x.low) * x.scale).permute(0, 3, 1, 2)
        y = F.conv2d(images, w["w.filter"].permute(3, 2, 0, 1), padding=padding)
        y = y.permute(0, 2, 3, 1) + w["w.bias"]
        if not result:
            return y.relu().to(value.dtype)
        y = y + (residual[0] + added.low) * added.scale
        levels = ((y / result.scale).round() - result.low).clamp(0, 255)
        return ((levels + result.low) * result.scale).to(value.dtype)

    def whole(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        filters = np.clip(np.rint(weights["w.filter"] * 40 * c**0.5 * kernel), -127, 127)
        filters[0, 0, 0] = 127
        weights["w.filter"] = (filters * 2.0**-9).astype(np.float32)
        weights["w.bias"] = np.rint(weights["w.bias"] * 16) / 16

    p, q = (each + 2 * padding - kernel + 1 for each in size)
    return Case(
        name,
        [(*size, c), *([(p, q, f)] if result else [])],
        {"w.filter": (kernel, kernel, c, f), "w.bias": (f,)},
        build,
        reference,
        whole,
        levels=True,
    )


def quantized_floats(
    name: str, size: tuple[int, int], c: int, f: int, kernel: int, result: Float8 | None
) -> Case:
    """Makes a case of quantized_conv2d on float8_e4m3fn, which it rounds x to, and widens y from.

    All are quarters, and steps powers of 2: so few bits that Hopper has their sums exactly.
    A result of 8 bits has a residual, too.
    """
    padding, added = kernel // 2, Float8(0.5)

    def build(w: Parameters, value: Any, *residual: Any) -> Any:
        filter, product, scales = w.quantized(
            "w.filter", "w.bias", 1, Float8(2.0), added if result else None, result, steps="w.steps"
        )
        y = nodes.quantized_conv2d(
            nodes.pointwise("x0 0.5 mul", [value], FLOAT8),
            filter,
            product,
            scales=scales,
            dtype=FLOAT8 if result else w.dtype.name,
            padding=padding,
            epilogue="add_relu" if result else "gelu",
            residual=nodes.pointwise("x0 2.0 mul", [*residual], FLOAT8) if result else None,
        )
        return nodes.pointwise(f"x0 {result.scale!r} mul", [y], w.dtype.name) if result else y

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, *residual: torch.Tensor
    ) -> torch.Tensor:
        y = F.conv2d(value.permute(0, 3, 1, 2), w["w.filter"].permute(3, 2, 0, 1), padding=padding)
        y = y.permute(0, 2, 3, 1) + w["w.bias"]
        if not result:
            return F.gelu(y).to(value.dtype)
        return (e4m3((y + residual[0]).relu() / result.scale) * result.scale).to(value.dtype)

    def quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        for x in inputs:
            x[...] = np.clip(np.rint(4 * x), -8, 8) / 4
        whole = np.rint(weights["w.filter"] * c**0.5 * kernel)
        weights["w.filter"] = (whole / 8).astype(np.float32)
        weights["w.steps"] = np.full(f, 1 / 8, np.float32)
        weights["w.bias"] = np.rint(weights["w.bias"] * 4) / 4

    p, q = (each + 2 * padding - kernel + 1 for each in size)
    return Case(
        name,
        [(*size, c), *([(p, q, f)] if result else [])],
        {"w.filter": (kernel, kernel, c, f), "w.bias": (f,), "w.steps": (f,)},
        build,
        reference,
        quarters,
        finite=True,
    )


def quantized_gelu(
    name: str, rows: int, c: int, f: int, x: Grid | Float8, result: Grid | Float8
) -> Case:
    """Makes a case of a product of 8 bits and its GELU, stored in 8 bits: one step off at most.

    A GELU that is good to 5.5e-5 decides halves otherwise.
    """
    low = getattr(x, "low", 0)

    def build(w: Parameters, value: Any) -> Any:
        filter, product, scales = w.quantized(
            "w.weight", "w.bias", 1, x, None, result, steps="w.steps", epilogue="gelu"
        )
        expression, _ = x.storing
        numbers = [repr(each) for each in (1 / x.scale, float(-low))]
        for i, number in enumerate(numbers):
            expression = expression.replace(f"x{i + 1}", number)
        y = nodes.as_images(
            nodes.quantized_conv2d, nodes.pointwise(expression, [value], x.stored), None,
            filter=filter, product=product, scales=scales, dtype=result.stored, epilogue="gelu",
        )  # fmt: skip
        zero = float(getattr(result, "low", 0))
        return nodes.pointwise(f"x0 {zero!r} add {result.scale!r} mul", [y], w.dtype.name)

    def reference(w: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        y = F.gelu(value @ w["w.weight"] + w["w.bias"])
        if isinstance(result, Float8):
            return (e4m3(y / result.scale) * result.scale).to(value.dtype)
        levels = ((y / result.scale).round() - result.low).clamp(0, 255)
        return ((levels + result.low) * result.scale).to(value.dtype)

    def quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        inputs[0][...] = np.clip(np.rint(4 * inputs[0]), -8, 8) / 4
        whole = np.clip(np.rint(weights["w.weight"] * c**0.5 * 2), -7, 7)
        weights["w.weight"] = (whole / 16).astype(np.float32)
        weights["w.steps"] = np.full(f, 1 / 16, np.float32)
        # No sum lies where what it is rounded to depends on the GELU's last digits.
        weights["w.bias"] = (np.rint(weights["w.bias"] * 4) / 4 + 0.01).astype(np.float32)

    shapes: dict[str, Shape] = {"w.weight": (c, f), "w.bias": (f,), "w.steps": (f,)}
    return Case(name, [(rows, c)], shapes, build, reference, quarters, finite=True)


def quantized_projections(name: str, tokens: int, keys: int, c: int, f: int) -> Case:
    """Makes a case of quantized_qkv_linear of float8_e4m3fn; its outputs one after the other."""
    parts = ("q", "k", "v")

    def build(w: Parameters, *inputs: Any) -> Any:
        made = [
            w.quantized(f"{part}.weight", f"{part}.bias", 1, Float8(2.0), steps=f"{part}.steps")
            for part in parts
        ]
        filters, products, _ = zip(*made, strict=True)
        values = [nodes.pointwise("x0 0.5 mul", [x], FLOAT8) for x in inputs]
        found = nodes.quantized_qkv_linear(values, filters, products, dtype=w.dtype.name)
        return ops.concat(found, axis=1)

    def reference(w: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        outputs = [
            x @ w[f"{part}.weight"] + w[f"{part}.bias"].to(x)
            for x, part in zip(inputs, parts, strict=True)
        ]
        return torch.cat(outputs, dim=1)

    def quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        for x in inputs:
            x[...] = np.clip(np.rint(4 * x), -8, 8) / 4
        for part in parts:
            whole = np.clip(np.rint(weights[f"{part}.weight"] * c**0.5 * 2), -7, 7)
            weights[f"{part}.weight"] = (whole / 8).astype(np.float32)
            weights[f"{part}.steps"] = np.full(f, 1 / 8, np.float32)

    shapes: dict[str, Shape] = {}
    for part in parts:
        shapes |= {f"{part}.weight": (c, f), f"{part}.bias": (f,), f"{part}.steps": (f,)}
    inputs = [(tokens, c), (keys, c), (keys, c)]
    return Case(name, inputs, shapes, build, reference, quarters, finite=True)


def quantized_shortcut(
    name: str, size: tuple[int, int], c: int, f: int, source_channels: int, x: Grid, result: Grid
) -> Case:
    """Makes a case of quantized_conv2d_shortcut on uint8, of a 3 x 3 and a 1 x 1 of stride 2.

    Scales are powers of 2. Of x they are so large that no sum of its products is rounded to a
    multiple of what one of the source stands for, and so small that the source's filter stays.
    """
    added = Grid(2.0**-9, -9)

    def build(w: Parameters, value: Any, source: Any) -> Any:
        filters, product, first = w.quantized_shortcut(
            ("w.filter", "v.filter"), ("w.bias", "v.bias"), (x, added), result
        )
        y = nodes.quantized_conv2d_shortcut(
            value, source, filters, product, first, padding=1, stride=2
        )
        return nodes.pointwise(widening(result), [y], w.dtype.name)

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        y = both(w, (value + x.low) * x.scale, (source + added.low) * added.scale)
        return stepped(y, result).to(value.dtype)

    def whole(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        in_steps(weights, "w", 12)
        in_steps(weights, "v", 40)

    return Case(
        name,
        [(*size, c), (*(2 * n - 1 for n in size), source_channels)],
        shortcut_weights(c, f, source_channels),
        build,
        reference,
        whole,
        levels=True,
    )


def quantized_shortcut_floats(
    name: str, size: tuple[int, int], c: int, f: int, source_channels: int, result: Float8
) -> Case:
    """Makes a case of quantized_conv2d_shortcut on float8_e4m3fn, as ``quantized_floats`` does."""

    def build(w: Parameters, value: Any, source: Any) -> Any:
        filters, product, first = w.quantized_shortcut(
            ("w.filter", "v.filter"), ("w.bias", "v.bias"), (Float8(2.0), Float8(0.5)), result,
            ("w.steps", "v.steps"),
        )  # fmt: skip
        y = nodes.quantized_conv2d_shortcut(
            nodes.pointwise("x0 0.5 mul", [value], FLOAT8),
            nodes.pointwise("x0 2.0 mul", [source], FLOAT8),
            filters, product, first, padding=1, stride=2, epilogue="relu",
        )  # fmt: skip
        return nodes.pointwise(widening(result), [y], w.dtype.name)

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        return stepped(both(w, value, source).relu(), result).to(value.dtype)

    def quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        in_quarters(inputs, weights, "w", "v")

    return Case(
        name,
        [(*size, c), (*(2 * n - 1 for n in size), source_channels)],
        shortcut_weights(c, f, source_channels) | {"w.steps": (f,), "v.steps": (f,)},
        build,
        reference,
        quarters,
        finite=True,
    )


def shortcut_weights(c: int, f: int, source_channels: int) -> dict[str, Shape]:
    """Names the weights of a 3 x 3 convolution and of the 1 x 1 beside it."""
    weights: dict[str, Shape] = {"w.filter": (3, 3, c, f), "v.filter": (1, 1, source_channels, f)}
    return weights | {"w.bias": (f,), "v.bias": (f,)}


def both(w: dict[str, torch.Tensor], x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Adds up a 3 x 3 convolution and a 1 x 1 of stride 2."""
    y = F.conv2d(x.permute(0, 3, 1, 2), w["w.filter"].permute(3, 2, 0, 1), padding=1)
    beside = source.permute(0, 3, 1, 2)
    y = y + F.conv2d(beside, w["v.filter"].permute(3, 2, 0, 1), stride=2)
    return y.permute(0, 2, 3, 1) + w["w.bias"] + w["v.bias"]


def quantized_chain(name: str, size: tuple[int, int], c: int, k: int, f: int) -> Case:
    """Makes a case of quantized_conv2d_chain on uint8; h and z side by side."""
    x, added, h, z = Grid(2.0**-5, -9), Grid(2.0**-4, -3), Grid(2.0**-4, 0), Grid(2.0**-4, 0)

    def build(w: Parameters, value: Any, residual: Any) -> Any:
        last, product, scales = w.quantized("w.filter", "w.bias", 1, x, added, h)
        following, scale, _ = w.quantized("v.filter", "v.bias", 1, h, None, z)
        return chained_bytes(w, value, residual, (last, following), (product, scale), scales, h, z)

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        y = ((value + x.low) * x.scale) @ w["w.filter"][0, 0] + w["w.bias"]
        return following(w, y + (residual + added.low) * added.scale, h, z).to(value.dtype)

    def whole(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        in_steps(weights, "w", 40)
        in_steps(weights, "v", 20)

    return Case(
        name, [(*size, c), (*size, k)], chain_weights(c, k, f), build, reference, whole, levels=True
    )


def quantized_shortcut_chain(name: str, size: tuple[int, int], k: int) -> Case:
    """Makes a case of quantized_conv2d_shortcut_chain on uint8, of 64 channels each."""
    x, added, h, z = Grid(2.0**-5, -10), Grid(2.0**-5, -6), Grid(2.0**-3, 0), Grid(2.0**-3, 0)

    def build(w: Parameters, value: Any, source: Any) -> Any:
        filters, product, first = w.quantized_shortcut(
            ("u.filter", "w.filter"), ("u.bias", "w.bias"), (x, added), h
        )
        last, scale, _ = w.quantized("v.filter", "v.bias", 1, h, None, z)
        found = nodes.quantized_conv2d_shortcut_chain(
            value, source, (*filters, last), product, first, scale
        )
        return side_by_side(w, found, (h, z))

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        y = ((value + x.low) * x.scale) @ w["u.filter"][0, 0] + w["u.bias"]
        y = y + ((source + added.low) * added.scale) @ w["w.filter"][0, 0] + w["w.bias"]
        return following(w, y, h, z).to(value.dtype)

    def whole(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        for each in ("u", "w", "v"):
            in_steps(weights, each, 20)

    weights = chain_weights(64, k, 64) | {"u.filter": (1, 1, 64, k), "u.bias": (k,)}
    return Case(name, [(*size, 64), (*size, 64)], weights, build, reference, whole, levels=True)


def quantized_chain_floats(name: str, size: tuple[int, int], c: int, k: int, f: int) -> Case:
    """Makes a case of quantized_conv2d_chain on float8_e4m3fn, as ``quantized_floats`` does.

    So large a step of h leaves few bits of it.
    """
    h, z = Float8(64.0), Float8(2.0**-6)

    def build(w: Parameters, value: Any, residual: Any) -> Any:
        last, product, scales = w.quantized(
            "w.filter", "w.bias", 1, Float8(2.0), Float8(0.5), h, steps="w.steps"
        )
        following, scale, _ = w.quantized("v.filter", "v.bias", 1, h, None, z, steps="v.steps")
        value = nodes.pointwise("x0 0.5 mul", [value], FLOAT8)
        residual = nodes.pointwise("x0 2.0 mul", [residual], FLOAT8)
        return chained_bytes(w, value, residual, (last, following), (product, scale), scales, h, z)

    def reference(
        w: dict[str, torch.Tensor], value: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        y = value @ w["w.filter"][0, 0] + w["w.bias"] + residual
        return following(w, y, h, z).to(value.dtype)

    def quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        in_quarters(inputs, weights, "w", "v")

    return Case(
        name,
        [(*size, c), (*size, k)],
        chain_weights(c, k, f) | {"w.steps": (k,), "v.steps": (f,)},
        build,
        reference,
        quarters,
        finite=True,
    )


def chain_weights(c: int, k: int, f: int) -> dict[str, Shape]:
    """Names the weights of two 1 x 1 convolutions, one behind the other."""
    weights: dict[str, Shape] = {"w.filter": (1, 1, c, k), "v.filter": (1, 1, k, f)}
    return weights | {"w.bias": (k,), "v.bias": (f,)}


def chained_bytes(
    w: Parameters,
    value: Any,
    residual: Any,
    filters: tuple[Any, Any],
    products: tuple[Any, Any],
    scales: Sequence[float],
    h: Grid | Float8,
    z: Grid | Float8,
) -> Any:
    """Puts what quantized_conv2d_chain gives side by side, widened."""
    found = nodes.quantized_conv2d_chain(
        value, filters, products, residual, residual_scale=scales[1]
    )
    return side_by_side(w, found, (h, z))


def side_by_side(w: Parameters, found: Sequence[Any], grids: Sequence[Grid | Float8]) -> Any:
    """Widens results of 8 bits, and puts them together along their channels."""
    pairs = zip(found, grids, strict=True)
    wider = [nodes.pointwise(widening(of), [y], w.dtype.name) for y, of in pairs]
    return ops.concat(wider, axis=3)


def following(
    w: dict[str, torch.Tensor], y: torch.Tensor, h: Grid | Float8, z: Grid | Float8
) -> torch.Tensor:
    """Rounds y to what a chain stores, and computes what follows."""
    first = stepped(y.relu(), h)
    second = stepped((first @ w["v.filter"][0, 0].to(first) + w["v.bias"]).relu(), z)
    return torch.cat([first, second.to(first)], dim=3)


def widening(of: Grid | Float8) -> str:
    """Writes what a number of 8 bits stands for."""
    return f"x0 {float(of.low)!r} add {of.scale!r} mul"


PROJECTED = {
    "of bytes": (Grid(2.0**-5, -120), Grid(2.0**-4, -131), Grid(2.0**-6, -99)),
    "of e4m3": (Float8(0.005), Float8(0.0025), Float8(0.007)),
}
"""To what a depthwise_qkv rounds query, key and value; many of each are beyond the largest."""


def stepped(y: torch.Tensor, to: Grid | Float8) -> torch.Tensor:
    """Rounds to 8 bits, and gives what they stand for."""
    if isinstance(to, Float8):
        return e4m3(y / to.scale) * to.scale
    return (((y / to.scale).round() - to.low).clamp(0, 255) + to.low) * to.scale


def in_steps(weights: dict[str, np.ndarray], name: str, deviation: float) -> None:
    """Makes the weights of a layer multiples of 2^-9, the largest of each filter 127 of them."""
    given = weights[f"{name}.filter"]
    filters = np.clip(np.rint(given * deviation * np.prod(given.shape[:3]) ** 0.5), -127, 127)
    filters[0, 0, 0] = 127
    weights[f"{name}.filter"] = (filters * 2.0**-9).astype(np.float32)
    weights[f"{name}.bias"] = np.rint(weights[f"{name}.bias"] * 16) / 16


def in_quarters(inputs: list[np.ndarray], weights: dict[str, np.ndarray], *names: str) -> None:
    """Makes activations quarters, and the weights of layers eighths."""
    for x in inputs:
        x[...] = np.clip(np.rint(4 * x), -8, 8) / 4
    for name in names:
        filters = weights[f"{name}.filter"]
        whole = np.rint(filters * np.prod(filters.shape[:3]) ** 0.5)
        weights[f"{name}.filter"] = (whole / 8).astype(np.float32)
        weights[f"{name}.steps"] = np.full(filters.shape[3], 1 / 8, np.float32)
        weights[f"{name}.bias"] = np.rint(weights[f"{name}.bias"] * 4) / 4


def conv(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    kernel: tuple[int, int],
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    then: str = "none",
    bias: bool = True,
    sparsity: float | None = None,
    spared: Shape | None = None,
    format: str = "",
) -> Case:
    """Makes a case of conv2d, or of sparse_conv2d with a share ``sparsity`` of zeros.

    Every third filter of a sparse one is empty; the number at ``spared`` stays. With ``format`` it
    is sparse_conv2d_packed: two of four channels are zeros, or ``sparsity`` is of blocks. Zeros of
    a sparse filter may be multiplied by infinity and NaN, or skipped; references do it both ways.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    weights = {"w.filter": (*kernel, c // groups, f)}
    if bias:
        weights["w.bias"] = (f,)

    def torch_conv(w: dict[str, torch.Tensor], x: torch.Tensor, *residual: Any) -> torch.Tensor:
        skips = sparsity is not None and x.dtype == torch.float64
        top, left, bottom, right = sides(geometry.get("padding", 0))
        filters = w["w.filter"].permute(3, 2, 0, 1)
        whole = bool(format) and not skips
        y = (skipping_conv2d if skips else F.conv2d)(
            F.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom)),
            of_one_group(filters, groups) if whole else filters,
            w["w.bias"] if bias else None,
            groups=1 if whole else groups,
            **{name: value for name, value in geometry.items() if name != "padding"},
        )
        return epilogue(y.permute(0, 2, 3, 1), then, *residual)

    def build(w: Parameters, x: Any, *residual: Any) -> Any:
        filter = w.filter("w", groups, sparse=sparsity is not None, format=format)
        return nodes.conv2d(
            x, filter, epilogue=then, residual=next(iter(residual), None), **geometry
        )

    def prune(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        if sparsity is not None:
            filters = weights["w.filter"]
            within = filters.shape[2]  # a group's channels
            rng = np.random.default_rng(1)
            drop = rng.random(filters.shape) < sparsity
            if format == "two_four":
                fours = rng.random((*kernel, -(-within // 4), 4, f)).argsort(axis=3) < 2
                drop |= fours.reshape(*kernel, -1, f)[:, :, :within]
            if format == "blocks":
                places = rng.random((*kernel, -(-within // 64), -(-f // 64))) < sparsity
                drop = places.repeat(64, axis=2).repeat(64, axis=3)[:, :, :within, :f].copy()
            drop[..., ::3] = True
            if spared:
                drop[spared] = False
            filters[drop] = 0

    inputs = [(*size, c)]
    if joining(then):
        meta = torch_conv(
            {k: torch.empty(s, device="meta") for k, s in weights.items()},
            torch.empty(1, *size, c, device="meta"),
            torch.empty((), device="meta"),
        )
        inputs.append(tuple(meta.shape[1:]))
    return Case(name, inputs, weights, build, torch_conv, prune)


def convolved(image: Shape, filter: Shape, window: dict[str, Any]) -> Shape:
    """Gives the height and width of what a convolution makes of an image."""
    meta = (torch.empty(size, device="meta") for size in ((1, *image), filter))
    return tuple(F.conv2d(*meta, **window).shape[2:])


def weight_grad(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    kernel: tuple[int, int],
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Case:
    """Makes a case of conv2d_weight_grad; its sum is over the batch too."""
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shape = (f, c // groups, *kernel)
    out = convolved((c, *size), shape, window)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        images = (y.permute(0, 3, 1, 2) for y in (x, dy))
        x, dy = (y.contiguous() for y in images)
        return torch.nn.grad.conv2d_weight(x, shape, dy, **window).permute(0, 2, 3, 1)

    return Case(
        f"conv2d_weight_grad {name}",
        [(*size, c), (*out, f)],
        {},
        lambda w, x, dy: nodes.conv2d_weight_grad(x, dy, kernel, tf32=w.tf32, **window),
        reference,
    )


def computed(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    kernel: tuple[int, int],
    *,
    groups: int = 1,
    **window: Any,
) -> Case:
    """Makes a case of conv2d whose filter is computed: weights, doubled."""
    shape = (f, c // groups, *kernel)

    def build(w: Parameters, x: TensorValue) -> TensorValue:
        filter = nodes.pointwise("x0 2.0 mul", [w.vector("filter", x.dtype).reshape(shape)])
        return nodes.conv2d(x, nodes.computed_filter(filter, None, groups, tf32=w.tf32), **window)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        filter = 2 * w["filter"].reshape(shape)
        return F.conv2d(x.permute(0, 3, 1, 2), filter, groups=groups, **window).permute(0, 2, 3, 1)

    weights = {"filter": (math.prod(shape),)}
    return Case(f"conv2d computed {name}", [(*size, c)], weights, build, reference)


def input_grad(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    kernel: tuple[int, int],
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Case:
    """Makes a case of conv2d_input_grad, whose filter is computed: weights, doubled."""
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shape = (f, c // groups, *kernel)
    out = convolved((c, *size), shape, window)

    def build(w: Parameters, dy: TensorValue) -> TensorValue:
        filter = nodes.pointwise("x0 2.0 mul", [w.vector("filter", dy.dtype).reshape(shape)])
        return nodes.conv2d_input_grad(dy, filter, size, tf32=w.tf32, **window)

    def reference(w: dict[str, torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
        images = dy.permute(0, 3, 1, 2).contiguous()
        filter = 2 * w["filter"].reshape(shape)
        dx = torch.nn.grad.conv2d_input((len(dy), c, *size), filter, images, **window)
        return dx.permute(0, 2, 3, 1)

    weights = {"filter": (math.prod(shape),)}
    return Case(f"conv2d_input_grad {name}", [(*out, f)], weights, build, reference)


def of_one_group(filters: torch.Tensor, groups: int) -> torch.Tensor:
    """Writes [F, C / groups, R, S] as [F, C, R, S], zero outside of the groups."""
    f, c, *window = filters.shape
    whole = filters.new_zeros(f, groups, c, *window)
    whole[torch.arange(f), torch.arange(f) // (f // groups)] = filters
    return whole.flatten(1, 2)


def skipping_conv2d(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, **geometry: Any
) -> torch.Tensor:
    """Convolves as if zeros of the filter were not there: 0 times infinity is 0."""
    y = F.conv2d(x.nan_to_num(0, 0, 0), w, bias, **geometry)

    def meets(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.to(y), w.to(y), **geometry) > 0

    up, down = x == torch.inf, x == -torch.inf
    most = meets(up, w > 0) | meets(down, w < 0)
    least = meets(up, w < 0) | meets(down, w > 0)
    y = y.where(~most, torch.inf).where(~least, -torch.inf)
    return y.where(~(most & least | meets(x.isnan(), w != 0)), torch.nan)


def product(
    name: str,
    a: Shape,
    b: Shape,
    *,
    alpha: float = 1.0,
    transpose: bool = False,
    shared: bool = False,
    bias: bool = False,
    then: str = "none",
) -> Case:
    """Makes a case of bmm; ``shared``: one b for the whole batch."""
    n = b[-2] if transpose else b[-1]
    weights: dict[str, Shape] = {"bias": (n,)} if bias else {}
    if shared:
        weights["b"] = b

    def build(w: Parameters, x: Any, *more: Any) -> Any:
        y, *residual = [w.vector("b", x.dtype), *more] if shared else more
        return nodes.bmm(
            x,
            y,
            alpha=alpha,
            transpose_b=transpose,
            bias=w.vector("bias") if bias else None,
            epilogue=then,
            residual=next(iter(residual), None),
            tf32=w.tf32,
        )

    def reference(w: Any, x: Any, *more: Any) -> torch.Tensor:
        y, *residual = [w["b"], *more] if shared else more
        out = alpha * (x @ (y.transpose(-1, -2) if transpose else y))
        return epilogue(out + w["bias"] if bias else out, then, *residual)

    inputs = [a] if shared else [a, b]
    if joining(then):
        inputs.append((*a[:-1], n))
    return Case(name, inputs, weights, build, reference)


def dense(
    name: str, x: Shape, f: int, then: str = "none", bias: bool = True, *, few: bool = False
) -> Case:
    """Makes a case of a linear layer; ``few`` is as nodes.linear has it."""
    weights = {"w.weight": (x[-1], f), **({"w.bias": (f,)} if bias else {})}

    def build(w: Parameters, a: Any, *residual: Any) -> Any:
        added = next(iter(residual), None)
        return nodes.linear(a, w.filter("w"), epilogue=then, residual=added, few=few)

    def reference(w: Any, a: Any, *residual: Any) -> torch.Tensor:
        y = a @ w["w.weight"]
        return epilogue(y + w["w.bias"] if bias else y, then, *residual)

    joins = joining(then)
    return Case(name, [x, (*x[:-1], f)] if joins else [x], weights, build, reference)


def along_tokens(name: str, t: int, c: int, f: int, then: str = "none") -> Case:
    """Makes a case of token_linear on [tokens, c]; the weight's last rows are zeros."""

    def build(w: Parameters, x: Any, *residual: Any) -> Any:
        weight = w.filter("w")
        return nodes.token_linear(x, weight, epilogue=then, residual=next(iter(residual), None))

    def reference(w: Any, x: Any, *residual: Any) -> torch.Tensor:
        y = (x.mT @ w["w.weight"][:t] + w["w.bias"].to(x)).mT
        return epilogue(y, then, *residual)

    def fill(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        weights["w.weight"][t:] = 0

    inputs = [(t, c), (f, c)] if joining(then) else [(t, c)]
    weights = {"w.weight": (t + -t % 8, f), "w.bias": (f,)}
    return Case(name, inputs, weights, build, reference, fill)


def pool(name: str, size: tuple[int, int], c: int, kernel: Any, **geometry: Any) -> Case:
    """Makes a case of maxpool or avgpool, by the name's first word."""
    max_ = name.startswith("maxpool")
    ours, theirs = (nodes.maxpool, F.max_pool2d) if max_ else (nodes.avgpool, F.avg_pool2d)
    return Case(
        name,
        [(*size, c)],
        {},
        lambda w, x: ours(x, kernel, **geometry),
        lambda w, x: theirs(x.permute(0, 3, 1, 2), kernel or size, **geometry).permute(0, 2, 3, 1),
        _negative if max_ else lambda x, w: None,
    )


def pool_grad(name: str, size: tuple[int, int], c: int, kernel: Any, **geometry: Any) -> Case:
    """Makes a case of max_pool2d_grad or avg_pool2d_grad, by the name's first word.

    Of x many numbers are equal, and of the first channels all are -inf.
    """
    max_ = name.startswith("max")
    pool = F.max_pool2d if max_ else F.avg_pool2d
    out = pool(torch.empty(1, c, *size, device="meta"), kernel, **geometry).shape[2:]

    def reference(w: dict[str, torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        # On a CPU: CUDA's torch takes the image's first pixel for a window of -inf alone.
        dy = given[-1].cpu().permute(0, 3, 1, 2)
        x = given[0].cpu().permute(0, 3, 1, 2) if max_ else dy.new_zeros(*dy.shape[:2], *size)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(pool(x, kernel, **geometry), x, dy)
        return dx.permute(0, 2, 3, 1).to(given[-1].device)

    def build(w: Parameters, *given: Any) -> Any:
        if max_:
            return nodes.max_pool2d_grad(*given, kernel, **geometry)
        return nodes.avg_pool2d_grad(*given, size, kernel, **geometry)

    def change(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        if max_:
            np.round(inputs[0], out=inputs[0])
            inputs[0][..., 0] = -np.inf

    images = [(*size, c), (*out, c)]
    return Case(name, images if max_ else images[1:], {}, build, reference, change)


def reduction(kind: str, x: Shape, axes: Shape) -> Case:
    """Makes a case of reduce; the mean of the numbers is not 0."""
    theirs = getattr(torch, kind)

    def shift(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        np.add(inputs[0], 0.5, out=inputs[0])

    return Case(
        f"reduce {kind} {x} {axes}",
        [x],
        {},
        lambda w, a: nodes.reduce(kind, a, axes, keepdim=len(x) == 2),
        lambda w, a: theirs(a, dim=axes, keepdim=len(x) == 2),
        shift,
    )


def terms(
    kind: str,
    axes: Shape,
    expression: str,
    reference: Any,
    *inputs: Shape,
    vectors: Sequence[Shape] = (),
) -> Case:
    """Makes a case of expressions that are reduced; ``reference`` gives what is, for each."""
    names = [f"{i}.bias" for i in range(len(vectors))]

    def build(w: Parameters, *values: Any) -> Any:
        given = [*values, *(w.vector(name) for name in names)]
        return ops.concat(nodes.reduce_terms(kind, expression, given, axes, True), -1)

    def theirs(w: dict[str, torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        found = reference(*values, *(w[name].to(values[0]) for name in names))
        return torch.cat([getattr(torch, kind)(x, dim=axes, keepdim=True) for x in found], -1)

    return Case(
        f"reduce {kind} of {expression}: {' '.join(map(str, inputs))} {axes}",
        inputs,
        dict(zip(names, vectors, strict=True)),
        build,
        theirs,
    )


def finished(
    kind: str,
    axes: Shape,
    expression: str,
    results: str,
    reference: Any,
    *inputs: Shape,
    behind: int = 0,
) -> Case:
    """Makes a case of expressions of what a reduction leaves; ``reference`` gives these.

    The last ``behind`` inputs are what they are computed with. Every other result is float32.
    """
    count = len(inputs) - behind

    def build(w: Parameters, *given: Any) -> Any:
        dtype = given[0].dtype
        wide = DType.float64 if dtype == DType.float64 else DType.float32
        dtypes = [(dtype, wide)[i % 2].name for i in range(len(results.split(BETWEEN)))]
        made = nodes.reduce_results(
            kind, expression, given[:count], axes, results, given[count:], dtypes, True
        )
        return ops.concat([nodes.pointwise("x0", [y], dtype.name) for y in made], -1)

    return Case(
        f"reduce {kind} and {results}: {' '.join(map(str, inputs))} {axes}",
        inputs,
        {},
        build,
        lambda w, *given: torch.cat(reference(*given), -1),
    )


def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """Gives a norm's scale and shift, and the mean."""
    mean = x.mean(1, keepdim=True)
    spread = (x * x).mean(1, keepdim=True) - mean * mean
    scale = (spread.clamp(min=0) + 1e-5).rsqrt() * weight
    return [scale, bias - mean * scale, mean]


def norm_gradient(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Gives the sums of a norm's gradient, and what they are multiplied by."""
    total, product = (y.sum(1, keepdim=True) for y in (dy, dy * x))
    return [total, product * w, (product * w * w).tanh(), total * w]


def _negative(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """Leaves no positive number, so that a padding of zeros would win the maximum."""
    np.subtract(inputs[0], 8, out=inputs[0])


def _some_infinite(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
    inputs[0][..., ::2] = -np.inf
    inputs[0][..., :1] = 1


def same(name: str, x: Shape, ours: Any, theirs: Any, **more: Any) -> Case:
    """Makes a case of an op with one input and no weights."""
    return Case(name, [x], {}, lambda w, a: ours(a), lambda w, a: theirs(a), **more)


def softmax_gradient(c: int) -> Case:
    """Makes a case of softmax_grad, of whose values none need add up to 1."""

    def reference(_: Any, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * (dy - (dy * y).sum(-1, keepdim=True))

    shapes = [(5, c), (5, c)]
    return Case(f"softmax_grad {c}", shapes, {}, lambda _, *x: nodes.softmax_grad(*x), reference)


def permuted(x: Shape, *axes: int) -> Case:
    """Makes a case of permute; axis 0 is the batch."""
    return same(
        f"permute {x} {axes}", x, lambda a: nodes.permute(a, axes), lambda a: a.permute(axes)
    )


def scattered(rows: int, count: int, c: int, *, each: bool = False) -> Case:
    """Makes a case of scatter_add of [count, c] to [rows, c], by indices of each image."""

    def build(_: Parameters, x: TensorValue, index: TensorValue, y: TensorValue) -> TensorValue:
        return nodes.scatter_add(x, index.cast(DType.int64), y, 1)

    def reference(_: Any, x: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = index.long().reshape(*index.shape[:2], -1).expand_as(y)
        return x.scatter_add(1, places % rows, y)

    def change(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        inputs[1][:] = np.floor(inputs[1] * 100) % rows - 1  # -1 is the last row

    name = f"scatter_add {'each ' * each}{(rows, count, c)}"
    shapes = [(rows, c), (count, c) if each else (count,), (count, c)]
    return Case(name, shapes, {}, build, reference, change)


def gathered(
    name: str,
    size: tuple[int, int],
    c: int,
    shape: Shape,
    axes: Shape,
    shifts: tuple[int, int] = (0, 0),
    *,
    first: bool = True,
    adds: bool = False,
    norms: bool = False,
) -> Case:
    """Makes a case of gather_rows on [rows, c]; a sum and its norm one after the other."""
    order = {"size": size, "shifts": shifts, "shape": shape, "axes": axes, "rolls_first": first}

    def build(w: Parameters, x: Any, onto: Any = None) -> Any:
        norm = (w.vector("weight"), w.vector("bias")) if norms else None
        made = nodes.gather_rows(x, onto=onto, norm=norm, **order)  # type: ignore[arg-type]
        return ops.concat(made, axis=1) if len(made) > 1 else made[0]

    def reference(w: Any, x: torch.Tensor, onto: Any = None) -> torch.Tensor:
        for rolls in (first, not first):
            if rolls:
                x = x.unflatten(1, size).roll(shifts, (1, 2)).flatten(1, 2)
            else:
                moved = x.unflatten(1, shape).movedim(
                    [a + 1 for a in axes], list(range(1, len(axes) + 1))
                )
                x = moved.flatten(1, len(axes))
        x = x if onto is None else onto + x
        y = F.layer_norm(x, (c,), w["weight"].to(x), w["bias"].to(x)) if norms else x
        return torch.cat([x, y], 1) if adds and norms else y

    rows = (math.prod(size), c)
    weights: dict[str, Shape] = {"weight": (c,), "bias": (c,)} if norms else {}
    return Case(name, [rows, rows] if adds else [rows], weights, build, reference)


def rolled(x: Shape, shifts: Sequence[int], axes: Sequence[int]) -> Case:
    """Makes a case of roll; axis 0 is the batch."""
    return same(
        f"roll {x} {shifts} {axes}",
        x,
        lambda a: nodes.roll(a, shifts, axes),
        lambda a: a.roll(tuple(shifts), tuple(axes)),
    )


def pointwise(
    expression: str, reference: Any, *inputs: Shape, vectors: Sequence[Shape] = (), spread: int = 4
) -> Case:
    """Makes a case of an expression; ``vectors`` are float32 weights, the last of its values."""
    names = [f"{i}.bias" for i in range(len(vectors))]

    def build(w: Parameters, *values: Any) -> Any:
        return nodes.pointwise(expression, [*values, *(w.vector(name) for name in names)])

    def wide(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        for x in inputs:
            np.multiply(x, spread, out=x)

    return Case(
        f"pointwise {expression}: {' '.join(map(str, inputs))}",
        inputs,
        dict(zip(names, vectors, strict=True)),
        build,
        lambda w, *values: reference(*values, *(w[name].to(values[0]) for name in names)),
        wide,
    )


def foreach(expression: str, reference: Any, *sizes: int) -> Case:
    """Makes a case of an expression of several members, of which x[size] of each image is one.

    A member reads its size twice where the expression has two values.
    """
    count = values_of(expression)

    def build(w: Parameters, *values: Any) -> Any:
        return nodes.concat(nodes.foreach(expression, values), -1)

    def theirs(w: dict[str, torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        members = [values[i : i + count] for i in range(0, len(values), count)]
        return torch.cat([reference(*each) for each in members], -1)

    shapes = [(size,) for size in sizes for _ in range(count)]
    return Case(f"foreach {expression}: {' '.join(map(str, sizes))}", shapes, {}, build, theirs)


def concatenated(expression: str, reference: Any, *inputs: Shape) -> Case:
    """Makes a case of an expression of a concat along the last axis, and of vectors."""
    count = len(set(expression.split(" ")) & {"x1", "x2", "x3"})
    names = [f"{i}.bias" for i in range(count)]

    def build(w: Parameters, *values: Any) -> Any:
        return nodes.concat(values, -1, expression, [w.vector(name) for name in names])

    def theirs(w: dict[str, torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        x = torch.cat(values, -1)
        return reference(x, *(w[name].to(x) for name in names))

    c = sum(shape[-1] for shape in inputs)
    return Case(
        f"concat {expression}: {' '.join(map(str, inputs))}",
        inputs,
        dict.fromkeys(names, (c,)),
        build,
        theirs,
    )


def masked(name: str, a: Shape, b: Shape) -> Case:
    """Makes a case of a mask, the result of one expression, that another one takes."""

    def build(w: Parameters, x: Any, y: Any) -> Any:
        mask = nodes.pointwise("x0 x1 lt", [x, y])
        return nodes.pointwise("x0 x1 x2 where", [mask, x, y])

    return Case(name, [a, b], {}, build, lambda w, x, y: torch.where(x < y, x, y))


def foreach_masked(*sizes: int) -> Case:
    """Makes a case of masks of several members, and of casts there and back of what they choose."""

    def build(w: Parameters, *values: Any) -> Any:
        masks = nodes.foreach("x0 x1 lt", values)
        given = [x for i, mask in enumerate(masks) for x in (mask, *values[2 * i : 2 * i + 2])]
        chosen = nodes.foreach("x0 x1 x2 where", given, wide(w.dtype).name)
        return nodes.concat(nodes.foreach("x0", chosen, w.dtype.name), -1)

    def theirs(w: dict[str, torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        pairs = zip(values[::2], values[1::2], strict=True)
        return torch.cat([torch.where(x < y, x, y) for x, y in pairs], -1)

    return Case("foreach masks", [(n,) for n in sizes for _ in range(2)], {}, build, theirs)


def foreach_counted(*sizes: int) -> Case:
    """Makes a case of counters, in int64: what one number is cast to, and one more."""

    def build(w: Parameters, *values: Any) -> Any:
        counters = [ops.cast(x, DType.int64) for x in values]
        more = nodes.foreach("x0 1.0 add", counters, "int64")
        return nodes.concat([ops.cast(x, w.dtype) for x in more], -1)

    return Case(
        "foreach counters",
        [(n,) for n in sizes],
        {},
        build,
        lambda w, *values: torch.cat([(x.long() + 1).to(x) for x in values], -1),
        finite=True,
    )


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to floats of 8 bits; torch itself makes NaN of what is beyond the largest."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


UNARY: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_grad": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "softplus": F.softplus,
    "0.0 6.0 clamp": F.relu6,
    "-1.5 inf clamp": lambda x: x.clamp(min=-1.5),
    "0.1 leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "1.5 elu": lambda x: F.elu(x, 1.5),
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "neg abs": torch.abs,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "3.0 pow 40.0 mul e4m3": lambda x: e4m3(x**3 * 40),  # small ones, and beyond the largest
    "3.0 pow": lambda x: x**3,
    "1e-05 sub": lambda x: x - 1e-5,
}
"""What may follow ``x0`` in an expression, and the same in torch."""
BINARY: dict[str, Any] = {
    "add": torch.add,
    "div": torch.div,
    "pow": torch.pow,
    "prelu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    **{name: lambda a, b, op=op: op(a, b).to(a) for name, op in (
        ("eq", torch.eq), ("ne", torch.ne), ("le", torch.le), ("gt", torch.gt), ("ge", torch.ge),
    )},
}  # fmt: skip
"""What may follow ``x0 x1``."""


def norm_between(c: int, given: str, made: str) -> Case:
    """Makes a case of layernorm of one dtype into another; nothing is the case's."""

    def build(w: Parameters, a: TensorValue) -> TensorValue:
        x, vectors = a.cast(DType[given or a.dtype.name]), [w.vector("weight"), w.vector("bias")]
        return nodes.layernorm(x, *vectors, dtype=made or a.dtype.name).cast(a.dtype)

    return Case(
        f"layernorm {c} of {given or 'x'} into {made or 'x'}",
        [(7, c)],
        {"weight": (c,), "bias": (c,)},
        build,
        lambda w, a: F.layer_norm(a, (c,), w["weight"].to(a), w["bias"].to(a)),
    )


def shifted(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """Moves the mean far from 0."""
    np.add(inputs[0], 3, out=inputs[0])


def norm(name: str, x: Shape, eps: float, *, first: bool = False) -> Case:
    """Makes a case of layernorm, or of layernorm_first, with a mean far from 0."""
    c = x[-1]
    op = nodes.layernorm_first if first else nodes.layernorm
    return Case(
        name,
        [x],
        {"weight": (c,), "bias": (c,)},
        lambda w, a: op(a, w.vector("weight"), w.vector("bias"), eps),
        lambda w, a: F.layer_norm(
            a[:, 0] if first else a, (c,), w["weight"].to(a), w["bias"].to(a), eps
        ),
        shifted,
    )


def classed(name: str, x: Shape, *, norms: bool = False) -> Case:
    """Makes a case of class_token, perhaps before normed tokens with a mean far from 0."""
    c = x[-1]

    def build(w: Parameters, x: Any) -> Any:
        norm = (w.vector("weight"), w.vector("bias")) if norms else None
        return nodes.class_token(x, w.vector("token", x.dtype), norm, 1e-3)

    def reference(w: Any, x: torch.Tensor) -> torch.Tensor:
        token = w["token"].to(x).expand(len(x), 1, c)
        y = F.layer_norm(x, (c,), w["weight"].to(x), w["bias"].to(x), 1e-3) if norms else x
        return torch.cat([token, y], 1)

    names = ["token", "weight", "bias"] if norms else ["token"]
    return Case(name, [x], dict.fromkeys(names, (c,)), build, reference, shifted)


def norm_grad(
    c: int, rows: Shape = (7,), *, scaled: bool = True, given: str = "", made: str = ""
) -> Case:
    """Makes a case of layer_norm_grad: dx, then a row each of dweight and dbias.

    ``given`` is the dtype of x, ``made`` that of dx, if they are not those of the case.
    """

    def shift(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        np.add(inputs[1], 3, out=inputs[1])

    def build(w: Parameters, dy: TensorValue, x: TensorValue) -> TensorValue:
        weight = w.vector("weight") if scaled else None
        held = x.cast(DType[given or x.dtype.name])
        found = nodes.layer_norm_grad(dy, held, weight, 1e-5, dtype=made or x.dtype.name)
        return ops.concat([each.cast(x.dtype).reshape((-1, c)) for each in found], 0)

    def reference(w: dict[str, torch.Tensor], dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)  # torch, too, rounds at the end
        wide, g = x.to(kind), dy.to(kind)
        rstd = (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        normed = (wide - wide.mean(-1, keepdim=True)) * rstd
        scaled_g = g * w["weight"].to(g) if scaled else g
        along = (scaled_g * normed).mean(-1, keepdim=True)
        dx = rstd * (scaled_g - scaled_g.mean(-1, keepdim=True) - normed * along)
        sums = [each.reshape(-1, c).sum(0, keepdim=True) for each in (g * normed, g)]
        return torch.cat([dx.reshape(-1, c), *sums]).to(x.dtype)

    name = f"layer_norm_grad {c}{'' if scaled else ' plain'}"
    name += f" of {given or 'x'} into {made or 'x'}" * bool(given or made)
    weights = {"weight": (c,)} if scaled else {}
    return Case(name, [(*rows, c)] * 2, weights, build, reference, shift)


def rms(x: Shape) -> Case:
    """Makes a case of rms_norm; CUDA's torch makes NaN of finite numbers beside infinity."""

    def reference(w: dict[str, torch.Tensor], a: torch.Tensor) -> torch.Tensor:
        wide = a.double()
        norm = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return norm.to(a) * w["weight"].to(a)

    return Case(
        f"rms_norm {x[-1]}",
        [x],
        {"weight": x[-1:]},
        lambda w, a: nodes.rms_norm(a, w.vector("weight"), 1e-6),
        reference,
    )


def grouped(x: Shape, groups: int, then: str = "none") -> Case:
    """Makes a case of group_norm of [..., C], with a mean far from 0."""

    def shift(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        np.add(inputs[0], 3 + np.arange(x[-1], dtype=np.float32) % 5, out=inputs[0])

    return Case(
        f"group_norm {x} {groups} {then}",
        [x],
        {"weight": x[-1:], "bias": x[-1:]},
        lambda w, a: nodes.group_norm(
            a, w.vector("weight"), w.vector("bias"), groups, 1e-6, epilogue=then
        ),
        lambda w, a: epilogue(
            F.group_norm(
                a.movedim(-1, 1), groups, w["weight"].to(a), w["bias"].to(a), 1e-6
            ).movedim(1, -1),
            then,
        ),
        shift,
    )


def rewritten(write: Callable[..., Sequence[Value]], axis: int) -> Callable[..., Any]:
    """Builds what the passes make of plain ops: one where the device has it, else several.

    Args:
        write: Writes the ops down, of a net and its inputs; images are [N, C, H, W].
        axis: Along which several outputs lie one behind the other.
    """

    def build(w: Parameters, *inputs: Any) -> Any:
        net, values = Net("case"), []
        for i, x in enumerate(inputs):
            shape = [int(dim) if isinstance(dim, StaticDim) else str(dim) for dim in x.shape]
            value = net.input(f"x{i}", shape, x.dtype.name)
            values.append(to_first(value) if len(shape) == 4 and x.dtype != DType.uint8 else value)
        for i, y in enumerate(write(net, *values)):
            net.output(f"y{i}", net.permute(y, 0, 2, 3, 1) if len(y.shape) == 4 else y)
        program = passes.run(net.program(), backend(w.device, w.dtype.name))
        w.tensors = {**w.tensors, **at_load(program, w)}
        outputs = emit(program, inputs, w)
        return outputs[0] if len(outputs) == 1 else ops.concat(outputs, axis=axis)

    return build


def at_load(program: Program, w: Parameters) -> dict[str, np.ndarray]:
    """Computes what a program makes of its weights when it loads, as ``Parameters`` takes it."""
    early = [node for node in program.nodes if node.at_load]
    plain = {}
    for name, of in program.weights.items() if early else ():
        array = w.tensors[w.prefix + name]
        axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(array.ndim, range(array.ndim))
        plain[name] = array.transpose(*axes).reshape([int(size) for size in of.shape])
    made = Canonical(Constants(program, plain), program)
    return {w.prefix + value: made[value] for node in early for value in node.outputs}


def to_first(x: Value) -> Value:
    return x.net.permute(x, 0, 3, 1, 2)


def to_last(x: Value) -> Value:
    """Puts the channels of images last."""
    return x.net.permute(x, 0, 2, 3, 1) if len(x.shape) == 4 else x


def stem(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    kernel: tuple[int, int],
    *,
    stride: int,
    padding: int,
    levels: bool = True,
    then: str = "none",
    pools: bool = False,
) -> Case:
    """Makes a case of stem_maxpool, stem_layernorm or stem_conv2d, by the name's first word."""
    op = name.split(" ")[0]
    pools = pools or op == "stem_maxpool"
    geometry = {"stride": stride, "padding": padding}
    mean = 100 + 10 * np.arange(c, dtype=np.float32)
    scale = 1 / (60 + 3 * np.arange(c, dtype=np.float32))
    weights: dict[str, Shape] = {"w.weight": (*kernel, c, f), "w.bias": (f,)}
    if levels:
        weights |= {"pixels.mean": (c,), "pixels.scale": (c,)}
    if op == "stem_layernorm":
        weights |= {"norm.weight": (f,), "norm.bias": (f,)}

    def build(w: Parameters, x: Any) -> Any:
        def write(net: Net, x: Value) -> list[Value]:
            if levels:
                normal = [net.weight(f"pixels.{part}", c) for part in ("mean", "scale")]
                x = to_first(net.op("normalize", [x, *normal], dtype=w.dtype.name))
            weights = [net.weight("w.weight", f, c, *kernel), net.weight("w.bias", f)]
            y = net.op("conv2d", [x, *weights], "w", **geometry)
            if pools:
                return [net.max_pool2d(net.relu(y), 3, stride=2, padding=1)]
            if op == "stem_conv2d":
                return [y if then == "none" else net.op(then, [y])]
            return [to_first(net.layer_norm(net.permute(y, 0, 2, 3, 1), "norm"))]

        return rewritten(write, 3)(w, x)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if levels:  # in float32 at least, as normalize does
            wide = torch.promote_types(x.dtype, torch.float32)
            means, scales = (torch.from_numpy(v).to(x.device, wide) for v in (mean, scale))
            x = ((x.to(wide) - means) * scales).to(x.dtype)
        y = F.conv2d(
            x.permute(0, 3, 1, 2), w["w.weight"].permute(3, 2, 0, 1), w["w.bias"], **geometry
        )
        if pools:
            return F.max_pool2d(y.relu(), 3, 2, 1).permute(0, 2, 3, 1)
        if op == "stem_conv2d":
            return epilogue(y.permute(0, 2, 3, 1), then)
        norm = w["norm.weight"].to(y), w["norm.bias"].to(y)
        return F.layer_norm(y.permute(0, 2, 3, 1), (f,), *norm)

    def set_levels(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        if levels:
            weights["pixels.mean"][:], weights["pixels.scale"][:] = mean, scale

    return Case(name, [(*size, c)], weights, build, reference, set_levels, levels)


def stem_chained(name: str, size: tuple[int, int]) -> Case:
    """Makes a case of stem_maxpool_conv2d on uint8 [size, 3], a ResNet's; y and z side by side."""
    plain = stem(name, size, 3, 64, (7, 7), stride=2, padding=3, pools=True)
    weights = plain.weights | {"next.weight": (1, 1, 64, 64), "next.bias": (64,)}

    def build(w: Parameters, x: Any) -> Any:
        levels = w.vector("pixels.mean"), w.vector("pixels.scale")
        filter = w.fragments("w.weight", "w.bias", stride=2)
        following = w.layer("next.weight", "next.bias")
        found = nodes.stem_maxpool_conv2d(x, filter, levels, following, stride=2, padding=3)
        return ops.concat(found, axis=3)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = plain.reference(w, x)
        z = (y @ w["next.weight"][0, 0] + w["next.bias"].to(y)).relu()
        return torch.cat([y, z], dim=3)

    return replace(plain, weights=weights, build=build, reference=reference)


def stem_of_bytes(op: str, size: tuple[int, int], f: int) -> Case:
    """Makes a case of stem_maxpool or stem_conv2d that stores uint8, which are widened again.

    Nothing rounds but the result: weights and normalised pixels are multiples of powers of 2.
    """
    window = {"stride": 2, "padding": 3}

    def build(w: Parameters, x: Any) -> Any:
        levels = w.vector("pixels.mean"), w.vector("pixels.scale")
        filter = w.fragments("w.filter", "w.bias", stride=2)
        y = getattr(nodes, op)(x, filter, levels, dtype="uint8", **window)
        return nodes.pointwise("x0", [y], w.dtype.name)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        images = ((x - 128) / 8).permute(0, 3, 1, 2)
        y = F.conv2d(images, w["w.filter"].permute(3, 2, 0, 1), w["w.bias"].to(x), **window)
        y = y.round().clamp(0, 255)
        return (F.max_pool2d(y, 3, 2, 1) if op == "stem_maxpool" else y).permute(0, 2, 3, 1)

    def whole(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        weights["w.filter"] = np.rint(weights["w.filter"] * 60) / 8
        weights["w.bias"] = np.rint(weights["w.bias"] * 16) / 2
        weights["pixels.mean"][:], weights["pixels.scale"][:] = 128, 1 / 8

    shapes = {"w.filter": (7, 7, 3, f), "w.bias": (f,), "pixels.mean": (3,), "pixels.scale": (3,)}
    return Case(f"{op} bytes", [(*size, 3)], shapes, build, reference, whole, levels=True)


def attend(
    name: str,
    t: int,
    s: int,
    heads: int,
    depth: int,
    scale: float | None = None,
    *,
    bias: tuple[int, int, int] | None = None,
    keys: bool = False,
    windows: int = 1,
    causal: bool = False,
    hidden: bool = False,
    tiles: bool = False,
    result: Rounding | None = None,
) -> Case:
    """Makes a case of attention from t queries to s keys.

    With a scale of 0, scores of -inf count as masked, and torch's as NaN.

    Args:
        name: Of the case.
        t: Queries.
        s: Keys.
        heads: Heads.
        depth: Channels of a head.
        scale: Of the scores.
        bias: How many images, heads and queries have one of their own: 1, or all.
        keys: Whether each image hides its last keys, by an input.
        windows: Windows of t tokens in an image.
        causal: Whether later keys are hidden.
        hidden: Whether the bias hides keys, and from a query all of them.
        tiles: Whether it hides 64 keys from all queries: a tile of a CPU's.
        result: The 8 bits that are stored and widened again, if any; the scale is a power of 2.
    """
    c, even = heads * depth, s + s % 2
    inputs: list[Shape] = [(windows * t, c), (windows * s, c), (windows * s, c)]
    inputs += [(1, even)] if keys else []
    weights = {"rows": (bias[0], bias[1] * bias[2], even)} if bias else {}

    def build(w: Parameters, q: Any, k: Any, v: Any, *seen: Any) -> Any:
        n = q.shape[0]
        if windows > 1:
            q, k, v = (
                x.reshape((n * windows, size, c))
                for x, size in zip((q, k, v), (t, s, s), strict=True)
            )
        rows = w.vector("rows", q.dtype) if bias else seen[0] if seen else None
        stored: dict[str, Any] = {}
        if result:
            stored = {"dtype": result.stored, "result_scale": result.scale}
            stored["result_low"] = float(result.low)
        y = nodes.attention(q, k, v, heads, scale=scale, bias=rows, causal=causal, **stored)
        if result:
            expression = f"x0 {float(result.low)} add {result.scale!r} mul"
            y = nodes.pointwise(expression, [y], w.dtype.name)
        return y.reshape((n, windows * t, c)) if windows > 1 else y

    def reference(
        w: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *seen: torch.Tensor
    ) -> torch.Tensor:
        n = len(q)
        q, k, v = (x.reshape(n * windows, -1, heads, depth).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * (depth**-0.5 if scale is None else scale)
        if bias:
            rows = w["rows"].to(q)[..., :s].unflatten(1, bias[1:])
            scores = scores + (rows if bias[0] == 1 else rows.repeat(n, 1, 1, 1))
        for rows in seen:
            scores = scores + rows[:, None, :, :s]
        if causal:
            scores = scores + torch.ones(t, s).tril().log().to(scores)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, -1, c)
        if isinstance(result, Float8):
            return e4m3(y / result.scale) * result.scale
        if result:  # NaN is stored as 0, too
            least, largest = result.bounds
            steps = (y / result.scale).round() * result.scale
            return steps.nan_to_num(least).clamp(least, largest)
        return y

    def change(x: list[np.ndarray], w: dict[str, np.ndarray]) -> None:
        if bias:
            rows = w["rows"]
            rows *= math.sqrt(rows.shape[0] * rows.shape[1])  # as large as scores
            if hidden:
                rows[rows > 1.5] = -np.inf
                rows[:, rows.shape[1] // 2] = -np.inf
                rows[:, -1, : s // 2] = -np.inf
            if tiles:
                rows[..., 64:128] = -np.inf
        for i, rows in enumerate(x[3] if keys else ()):
            rows[:, max(1, s - 1 - 40 * i) :] = -np.inf

    # What hidden keys hold is not read everywhere, so that NaN there may come to nothing.
    finite = scale == 0 or keys or causal or tiles
    return Case(name, inputs, weights, build, reference, change, finite=finite)


def attend_grad(
    name: str,
    t: int,
    s: int,
    heads: int,
    depth: int,
    *,
    bias: tuple[int, int, int] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Case:
    """Makes a case of attention_grad, on what attention_logsumexp keeps: dq, dk and dv in a row.

    Args:
        name: Of the case.
        t: Queries.
        s: Keys.
        heads: Heads.
        depth: Channels of a head.
        bias: How many images, heads and queries have one of their own: 1, or all. It hides some
            keys, and all of them from the last query.
        causal: Whether later keys are hidden.
        scale: Of the scores.
    """
    c, even = heads * depth, s + s % 2
    factor = depth**-0.5 if scale is None else scale

    def build(w: Parameters, q: Any, k: Any, v: Any, dy: Any) -> Any:
        rows = w.vector("rows", q.dtype) if bias else None
        rest: dict[str, Any] = {"scale": factor, "bias": rows, "causal": causal}
        y, kept = nodes.attention_logsumexp(q, k, v, heads, **rest)
        return ops.concat(nodes.attention_grad(q, k, v, y, dy, kept, heads, **rest), 1)

    def reference(w: Any, *given: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            *inputs, dy = (x.detach().requires_grad_() for x in given)
            q, k, v = (x.unflatten(2, (heads, depth)).transpose(1, 2) for x in inputs)
            scores = q @ k.mT * factor
            if bias:
                scores = scores + w["rows"].to(q)[..., :s].unflatten(1, bias[1:])
            if causal:
                scores = scores + torch.ones(t, s).tril().log().to(scores)
            hidden = (scores == -math.inf).all(-1, keepdim=True)
            p = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
            y = (p @ v).transpose(1, 2).flatten(2)
            return torch.cat(torch.autograd.grad(y, inputs, dy), 1)

    def change(x: list[np.ndarray], w: dict[str, np.ndarray]) -> None:
        if bias:
            rows = w["rows"]
            rows *= math.sqrt(rows.shape[0] * rows.shape[1])
            rows[rows > 1.5] = -np.inf
            if bias[2] > 1:
                rows[:, -1] = -np.inf

    inputs: list[Shape] = [(t, c), (s, c), (s, c), (t, c)]
    weights: dict[str, Shape] = {"rows": (bias[0], bias[1] * bias[2], even)} if bias else {}
    finite = causal or bias is not None or s == 1  # what is hidden, or is 0, may hold anything
    return Case(f"attention_grad {name}", inputs, weights, build, reference, change, finite=finite)


def joined(
    name: str,
    size: tuple[int, int],
    c: int,
    f: int,
    source: tuple[int, int, int],
    kernel: int = 1,
    stride: int = 1,
) -> Case:
    """Makes a case of conv2d_shortcut: x [size, c], and a source [H', W', C']."""
    padding = kernel // 2
    weights: dict[str, Shape] = {
        "last.filter": (kernel, kernel, c, f),
        "last.bias": (f,),
        "shortcut.filter": (1, 1, source[2], f),
        "shortcut.bias": (f,),
    }

    def build(w: Parameters, x: Any, y: Any) -> Any:
        return nodes.conv2d_shortcut(
            x, w.filter("last"), y, w.filter("shortcut"), padding=padding, stride=stride
        )

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.permute(0, 3, 1, 2), y.permute(0, 3, 1, 2)
        last, short = (w[f"{name}.filter"].permute(3, 2, 0, 1) for name in ("last", "shortcut"))
        sum = F.conv2d(x, last, w["last.bias"].to(x), padding=padding)
        sum = sum + F.conv2d(y, short, w["shortcut.bias"].to(x), stride=stride)
        return sum.relu().permute(0, 2, 3, 1)

    return Case(name, [(*size, c), source], weights, build, reference)


def chained(name: str, size: tuple[int, int], c: int, k: int, f: int, *, s: int = 0) -> Case:
    """Makes a case of conv2d_chain: x [size, c], a residual [size, k]; h and z side by side.

    Of conv2d_shortcut_chain if a shortcut has ``s`` channels, and a filter of its own.
    """
    weights: dict[str, Shape] = {
        "last.weight": (1, 1, c, k),
        "last.bias": (k,),
        "next.weight": (1, 1, k, f),
        "next.bias": (f,),
    }
    weights |= {"shortcut.weight": (1, 1, s, k), "shortcut.bias": (k,)} if s else {}

    def write(net: Net, x: Value, residual: Value) -> list[Value]:
        residual = net.conv2d(residual, "shortcut", k, 1) if s else residual
        h = net.relu(net.conv2d(x, "last", k, 1) + residual)
        return [h, net.relu(net.conv2d(h, "next", f, 1))]

    def reference(
        w: dict[str, torch.Tensor], x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        if s:
            residual = residual @ w["shortcut.weight"][0, 0] + w["shortcut.bias"].to(x)
        h = (x @ w["last.weight"][0, 0] + w["last.bias"].to(x) + residual).relu()
        z = (h @ w["next.weight"][0, 0] + w["next.bias"].to(x)).relu()
        return torch.cat([h, z], dim=3)

    return Case(name, [(*size, c), (*size, s or k)], weights, rewritten(write, 3), reference)


def averaged(
    name: str, size: tuple[int, int], c: int, f: int, then: str = "none", *, keepdim: bool = True
) -> Case:
    """Makes a case of conv2d_mean."""

    def build(w: Parameters, x: Any, *residual: Any) -> Any:
        added = next(iter(residual), None)
        return nodes.conv2d_mean(x, w.filter("w"), epilogue=then, residual=added, keepdim=keepdim)

    def reference(w: Any, x: Any, *residual: Any) -> torch.Tensor:
        y = x @ w["w.weight"][0, 0] + w["w.bias"].to(x)
        return epilogue(y, then, *residual).mean((1, 2), keepdim=keepdim)

    weights: dict[str, Shape] = {"w.weight": (1, 1, c, f), "w.bias": (f,)}
    inputs = [(*size, c), (*size, f)] if joining(then) else [(*size, c)]
    return Case(name, inputs, weights, build, reference)


def mlp(name: str, tokens: int, c: int, k: int, *, measured: bool = False) -> Case:
    """Makes a case of layernorm_mlp on [tokens, c]; ``measured``: a layer makes them and adds x."""
    weights: dict[str, Shape] = {"norm.weight": (c,), "norm.bias": (c,)}
    weights |= {"fc1.weight": (c, k), "fc1.bias": (k,), "fc2.weight": (k, c), "fc2.bias": (c,)}
    weights |= {"proj.weight": (c, c), "proj.bias": (c,)} if measured else {}

    def write(net: Net, x: Value) -> list[Value]:
        x = x + net.linear(x, "proj", c) if measured else x
        h = net.gelu(net.linear(net.layer_norm(x, "norm"), "fc1", k))
        return [x + net.linear(h, "fc2", c)]

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if measured:
            x = x + x @ w["proj.weight"] + w["proj.bias"].to(x)
        y = F.layer_norm(x, (c,), w["norm.weight"].to(x), w["norm.bias"].to(x))
        h = F.gelu(y @ w["fc1.weight"] + w["fc1.bias"].to(x))
        return x + h @ w["fc2.weight"] + w["fc2.bias"].to(x)

    return Case(name, [(tokens, c)], weights, rewritten(write, 1), reference, _halved)


def around_norm(
    name: str, size: Shape, k: int, c: int, *filters: int, then: str = "none", bias: bool = True,
    mean: float = 0.0, whole: bool = False,
) -> Case:  # fmt: skip
    """Makes a case of linear_moments, and of normed_linear for each number of filters.

    Args:
        name: Of the case.
        size: Of tokens, or of an image.
        k: Channels of what the first layer reads.
        c: Channels of what is added to its result.
        filters: Of each layer that reads the norm of the sum; results are side by side.
        then: What these end with.
        bias: Whether the layers have one.
        mean: Of what is added, about.
        whole: Whether the sum is a result, too.
    """
    layers = {f"{i}": (c, f) for i, f in enumerate(filters)}
    weights: dict[str, Shape] = {"norm.weight": (c,), "norm.bias": (c,)}
    for layer, shape in {"proj": (k, c), **layers}.items():
        weights |= {f"{layer}.weight": shape, **({f"{layer}.bias": shape[1:]} if bias else {})}
    words = activation(then)

    def write(net: Net, *inputs: Value) -> list[Value]:
        x, residual = (to_last(value) for value in inputs)
        y = residual + net.linear(x, "proj", c, bias=bias)
        z = net.layer_norm(y, "norm", 1e-6)
        ends = [net.linear(z, name, f, bias=bias) for name, (_, f) in layers.items()]
        ends = [net.op(words, [end]) if words else end for end in ends]
        return [to_first(y) if len(size) == 2 else y for y in ([y] if whole else []) + ends]

    def linear(w: dict[str, torch.Tensor], x: torch.Tensor, layer: str) -> torch.Tensor:
        y = x @ w[f"{layer}.weight"]
        return y + w[f"{layer}.bias"].to(x) if bias else y

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = y + linear(w, x, "proj")
        z = F.layer_norm(y, (c,), w["norm.weight"].to(x), w["norm.bias"].to(x), 1e-6)
        ends = [epilogue(linear(w, z, layer), then) for layer in layers]
        return torch.cat([y, *ends] if whole else ends, -1)

    def change(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
        inputs[1] += np.float32(mean)
        _halved(inputs, weights)

    inputs = [(*size, k), (*size, c)]
    return Case(name, inputs, weights, rewritten(write, len(size) + 1), reference, change)


def projected(
    name: str, t: int, s: int, *, heads: int = 6, bias: bool = True, sharp: float = 1.0
) -> Case:
    """Makes a case of attention_linear: heads of 64 channels, and the layer behind them.

    Args:
        name: Of the case.
        t: Queries.
        s: Keys.
        heads: 6, or 1.
        bias: Whether the layer has one.
        sharp: Scales the scores, beside what is usual.
    """
    c, scale = 64 * heads, sharp / 8
    weights: dict[str, Shape] = {"norm.weight": (c,), "norm.bias": (c,)}
    for layer, f in (("proj", c), ("end", 8)):
        weights |= {f"{layer}.weight": (c, f), **({f"{layer}.bias": (f,)} if bias else {})}

    def write(net: Net, *inputs: Value) -> list[Value]:
        q, k, v, residual = (to_last(value) for value in inputs)
        split = [net.permute(net.reshape(x, x.shape[0], x.size(1), heads, 64), 0, 2, 1, 3)
                 for x in (q, k, v)]  # fmt: skip
        y = net.op("scaled_dot_product_attention", split, scale=scale)
        y = net.reshape(net.permute(y, 0, 2, 1, 3), q.shape[0], t, c)
        y = residual + net.linear(y, "proj", c, bias=bias)
        return [y, net.linear(net.layer_norm(y, "norm", 1e-6), "end", 8, bias=bias)]

    def linear(w: dict[str, torch.Tensor], x: torch.Tensor, layer: str) -> torch.Tensor:
        y = x @ w[f"{layer}.weight"]
        return y + w[f"{layer}.bias"].to(x) if bias else y

    def reference(w: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        *split, residual = inputs
        q, k, v = (x.unflatten(-1, (heads, 64)).transpose(-3, -2) for x in split)
        y = ((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v).transpose(-3, -2).flatten(-2)
        y = residual + linear(w, y, "proj")
        z = F.layer_norm(y, (c,), w["norm.weight"].to(y), w["norm.bias"].to(y), 1e-6)
        return torch.cat([y, linear(w, z, "end")], -1)

    inputs = [(t, c), (s, c), (s, c), (t, c)]
    return Case(name, inputs, weights, rewritten(write, 2), reference, _halved)


def _halved(inputs: list[np.ndarray], weights: dict[str, np.ndarray]) -> None:
    """Rounds weights, so that all dtypes have them, and their products are rounded once."""
    for name, weight in weights.items():
        weights[name] = torch.from_numpy(weight).bfloat16().float().numpy()


def gated(size: tuple[int, int], c: int, k: int, act: str, gate: str, then: str = "none") -> Case:
    """Makes a case of squeeze_excite of x [size, c]; its residual is another input."""
    weights: dict[str, Shape] = {
        "squeeze.weight": (1, 1, c, k),
        "squeeze.bias": (k,),
        "excite.weight": (1, 1, k, c),
        "excite.bias": (c,),
    }

    def write(net: Net, x: Value, *residual: Value) -> list[Value]:
        y = net.op("mean", [x], axes=(2, 3), keepdim=True)
        y = net.op(act, [net.conv2d(y, "squeeze", k, 1)])
        y = net.op("mul", [x, net.op(gate, [net.conv2d(y, "excite", c, 1)])])
        for each in residual:
            y = y + each
        words = activation(then)
        return [net.op(words, [y]) if words else y]

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        y = x.mean((1, 2))
        for name, end in (("squeeze", act), ("excite", gate)):
            y = UNARY[end](y @ w[f"{name}.weight"][0, 0] + w[f"{name}.bias"].to(x))
        return epilogue(x * y[:, None, None], then, *more)

    inputs = [(*size, c)] * (2 if joining(then) else 1)
    name = f"squeeze_excite {size} {c} {k} {act} {gate} {then}"
    return Case(name, inputs, weights, rewritten(write, 3), reference)


def projections(name: str, tokens: int, keys: int, c: int, f: int) -> Case:
    """Makes a case of qkv_linear; its three outputs one after the other."""
    parts = ("q", "k", "v")
    weights: dict[str, Shape] = {}
    for part in parts:
        weights |= {f"{part}.weight": (c, f), f"{part}.bias": (f,)}

    def build(w: Parameters, *inputs: Any) -> Any:
        q, k, v = (w.filter(part) for part in parts)
        return ops.concat(nodes.qkv_linear(inputs, (q, k, v)), axis=1)

    def reference(w: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        outputs = [
            x @ w[f"{part}.weight"] + w[f"{part}.bias"].to(x)
            for x, part in zip(inputs, parts, strict=True)
        ]
        return torch.cat(outputs, dim=1)

    return Case(name, [(tokens, c), (keys, c), (keys, c)], weights, build, reference)


def project(
    name: str,
    size: tuple[int, int],
    c: int,
    *,
    kernel: int = 3,
    padding_kv: int = 1,
    stride_kv: int = 2,
    token: bool = False,
    to: Sequence[Grid | Float8] = (),
) -> Case:
    """Makes a case of depthwise_qkv; its three outputs one after the other.

    Each is rounded ``to`` 8 bits, if it is told, and widened again.
    """
    parts = ("q", "k", "v")
    weights: dict[str, Shape] = {"norm.weight": (c,), "norm.bias": (c,)}
    for part in parts:
        weights |= {f"{part}.weight": (kernel, kernel, 1, c), f"{part}.bias": (c,)}
    padding_q = (kernel - 1) // 2

    def write(net: Net, x: Value) -> list[Value]:
        y, found = net.layer_norm(x, "norm"), []
        image = net.slice(y, 1, 1, y.size(1)) if token else y
        image = to_first(net.reshape(image, y.shape[0], *size, c))
        first = [net.slice(y, 1, 0, 1)] if token else []
        for part in parts:
            stride, padding = (1, padding_q) if part == "q" else (stride_kv, padding_kv)
            z = net.conv2d(image, part, c, kernel, stride=stride, padding=padding, groups=c)
            z = net.permute(z, 0, 2, 3, 1)
            z = net.reshape(z, z.shape[0], z.size(1) * z.size(2), c)
            found.append(net.concat([*first, z], axis=1) if token else z)
        return found

    def write_bytes(net: Net, x: Value) -> list[Value]:
        given, numbers = [net.weight("norm.weight", c), net.weight("norm.bias", c)], {}
        for part, of in zip(parts, to, strict=True):
            given += [net.weight(f"{part}.weight", c, 1, kernel, kernel)]
            given += [net.weight(f"{part}.bias", c)]
            numbers |= {f"{part}_scale": of.scale, f"{part}_low": float(of.low)}
        found = net.several(
            "depthwise_qkv", [x, *given], size=size, kernel=kernel, padding_q=padding_q,
            padding_kv=padding_kv, stride_kv=stride_kv, class_token=token, dtype=to[0].stored,
            **numbers,
        )  # fmt: skip
        return [
            net.op("pointwise", [y], expression=widening(of), dtype=x.type.dtype)
            for y, of in zip(found, to, strict=True)
        ]

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (c,), w["norm.weight"].to(x), w["norm.bias"].to(x))
        image = y[:, int(token) :].unflatten(1, size).permute(0, 3, 1, 2)
        found = []
        for part in parts:
            stride, padding = (1, padding_q) if part == "q" else (stride_kv, padding_kv)
            filter, bias = w[f"{part}.weight"].permute(3, 2, 0, 1), w[f"{part}.bias"].to(x)
            z = F.conv2d(image, filter, bias, stride=stride, padding=padding, groups=c)
            found.append(torch.cat([y[:, : int(token)], z.flatten(2).permute(0, 2, 1)], dim=1))
        return torch.cat(
            [stepped(y, of) for y, of in zip(found, to, strict=True)] if to else found, 1
        )

    build = rewritten(write_bytes if to else write, 1)
    inputs, finite = [(size[0] * size[1] + token, c)], any(isinstance(of, Grid) for of in to)
    return Case(name, inputs, weights, build, reference, finite=finite)


CASES = [
    # Layers of the networks, their sizes cut down.
    conv("conv2d stem 7x7/2", (39, 33), 3, 64, (7, 7), stride=2, padding=3, then="relu"),
    conv("conv2d 3x3", (14, 14), 64, 64, (3, 3), padding=1, then="relu"),
    conv("conv2d 3x3 last filters", (8, 9), 32, 104, (3, 3), padding=1, then="add_relu"),
    conv("conv2d 3x3/2", (15, 14), 32, 96, (3, 3), stride=2, padding=1),
    conv("conv2d 1x1 add_relu", (7, 7), 64, 256, (1, 1), then="add_relu"),
    conv("conv2d 1x1/2", (14, 13), 64, 128, (1, 1), stride=2),
    conv("conv2d embedding 7x7/4", (32, 32), 3, 64, (7, 7), stride=4, padding=2),
    conv("conv2d depthwise 3x3", (9, 8), 64, 64, (3, 3), padding=1, groups=64),
    conv("conv2d depthwise 3x3/2", (9, 9), 96, 96, (3, 3), stride=2, padding=1, groups=96),
    # Stems: sizes below a tile, tiles and one pixel more, odd and even sizes and offsets.
    *(
        stem(f"stem_maxpool {h} x {w}", (h, w), 3, 64, (7, 7), stride=2, padding=3)
        for h, w in ((1, 2), (7, 7), (32, 32), (33, 39), (75, 91), (45, 224), (224, 224))
    ),
    *(
        stem(f"stem_layernorm {h} x {w}", (h, w), 3, 64, (7, 7), stride=4, padding=2)
        for h, w in ((5, 3), (32, 32), (39, 53), (224, 224))
    ),
    stem("stem_maxpool floats", (35, 30), 3, 64, (7, 7), stride=2, padding=3, levels=False),
    stem("stem_layernorm floats", (35, 30), 3, 64, (7, 7), stride=4, padding=2, levels=False),
    stem("stem_maxpool grey", (20, 37), 1, 32, (5, 5), stride=2, padding=2),
    stem("stem_maxpool 4 channels", (21, 19), 4, 96, (3, 3), stride=1, padding=0),
    stem("stem_maxpool 48 filters", (20, 20), 3, 48, (7, 7), stride=2, padding=3),
    stem("stem_layernorm 192", (60, 300), 3, 192, (7, 7), stride=4, padding=2),
    stem("stem_conv2d silu", (35, 30), 3, 16, (3, 3), stride=2, padding=1, then="silu"),
    stem("stem_conv2d floats", (35, 30), 3, 72, (3, 3), stride=1, padding=1, levels=False),
    # Epilogues.
    *(
        conv(f"conv2d epilogue {e}", (5, 6), 24, 40, (3, 3), padding=1, then=e)
        for e in EPILOGUES
    ),
    conv("conv2d depthwise 3x3/2 below", (12, 14), 96, 96, (3, 3), stride=2, padding=(0, 0, 1, 1),
         groups=96),
    conv("conv2d depthwise 5x5/2 below", (14, 9), 40, 40, (5, 5), stride=2, padding=(1, 2, 2, 2),
         groups=40, then="relu"),
    conv("conv2d depthwise 5x5 tiles", (19, 23), 72, 72, (5, 5), padding=2, groups=72),
    conv("conv2d depthwise 3x3 strips", (7, 14), 40, 40, (3, 3), padding=1, groups=40, then="add"),
    conv("conv2d depthwise 3x3/2 strips", (13, 12), 20, 20, (3, 3), stride=2, padding=1, groups=20),
    conv("conv2d depthwise 7x7 strips", (5, 13), 72, 72, (7, 7), padding=3, groups=72, then="gelu"),
    conv("conv2d depthwise dilated", (13, 11), 24, 24, (7, 7), padding=6, dilation=2, groups=24),
    conv("conv2d depthwise 3x3/3", (16, 10), 16, 16, (3, 3), stride=3, padding=1, groups=16),
    conv("conv2d 3x3/2 below", (12, 14), 3, 32, (3, 3), stride=2, padding=(0, 0, 1, 1)),
    conv("conv2d 3x3 above", (9, 8), 64, 64, (3, 3), padding=(2, 1, 0, 1)),
    conv("conv2d 3x3 tiles", (13, 15), 48, 40, (3, 3), padding=1, then="add_relu"),
    conv("conv2d 3x3 tiles unpadded", (12, 15), 32, 33, (3, 3)),
    conv("conv2d 3x3 tiles of 80", (11, 10), 80, 136, (3, 3), padding=(0, 1, 2, 0), then="relu"),
    conv("conv2d 3x3 many tiles", (42, 44), 32, 64, (3, 3), padding=1, then="relu"),
    conv("conv2d 3x3 many tiles of 80", (28, 28), 80, 32, (3, 3), padding=1, bias=False),
    conv("conv2d 1x1 padded", (5, 6), 64, 64, (1, 1), padding=(0, 0, 1, 2)),
    conv("conv2d depthwise add", (6, 5), 20, 20, (3, 3), padding=1, groups=20, then="add"),
    conv("conv2d no bias", (6, 6), 16, 16, (1, 1), bias=False),
    # Tile sizes and one more or less: 6 pixels, 64 columns, vectors of 16, 16 steps of K.
    *(conv(f"conv2d {q} pixels", (1, q), 8, 16, (1, 1)) for q in (1, 5, 6, 7, 63, 64, 65)),
    *(conv(f"conv2d {f} filters", (3, 3), 5, f, (1, 1)) for f in (1, 15, 17, 33, 63, 65, 130)),
    *(conv(f"conv2d {c} channels", (4, 4), c, 8, (3, 3), padding=1) for c in (1, 2, 15, 17)),
    conv("conv2d 1030 padded channels", (3, 3), 1030, 8, (3, 3), padding=1),
    # Geometry.
    conv("conv2d uneven", (11, 13), 6, 10, (3, 5), stride=(2, 3), padding=(2, 1), dilation=(3, 2)),
    conv("conv2d dilated", (12, 12), 16, 16, (3, 3), padding=2, dilation=2),
    conv("conv2d even kernel", (8, 8), 12, 20, (2, 4), padding=(1, 2)),
    conv("conv2d 1x1 of 24", (7, 11), 20, 24, (1, 1), then="add"),
    conv("conv2d 1x1 of 88", (6, 6), 40, 88, (1, 1), then="hardswish"),
    conv("conv2d 2 groups", (6, 6), 32, 64, (3, 3), padding=1, groups=2, then="relu"),
    conv("conv2d 5 uneven groups", (6, 7), 15, 35, (3, 3), padding=1, groups=5),
    conv("conv2d 4 wide groups", (9, 9), 128, 288, (3, 3), padding=1, groups=4, then="relu"),
    conv("conv2d 4 groups of 5 filters", (9, 9), 32, 20, (3, 3), padding=1, groups=4),
    conv("conv2d depthwise of 10", (7, 7), 10, 10, (5, 5), padding=2, groups=10),
    conv("conv2d groups of 4", (9, 11), 48, 48, (3, 3), padding=1, groups=12, then="relu"),
    conv("conv2d groups of 8", (8, 7), 96, 96, (3, 3), stride=2, padding=1, groups=12),
    conv("conv2d groups of 8 strips", (5, 7), 48, 48, (3, 3), padding=1, groups=6, then="relu"),
    conv("conv2d groups of 16 strips", (9, 13), 32, 32, (3, 3), stride=2, padding=1, groups=2),
    conv("conv2d groups of 16", (5, 6), 32, 32, (5, 3), padding=(2, 1), groups=2, then="add"),
    conv("conv2d depthwise twice", (7, 7), 12, 24, (3, 3), padding=1, groups=12),
    conv("conv2d 1x1 image", (1, 1), 16, 16, (3, 3), padding=1),
    computed("depthwise 3x3", (9, 8), 72, 72, (3, 3), padding=1, groups=72),
    computed("depthwise 5x5/2", (14, 9), 40, 40, (5, 5), stride=2, padding=2, groups=40),
    computed("depthwise uneven", (9, 7), 12, 12, (3, 5), padding=(2, 4), dilation=2, groups=12),
    computed("depthwise of 10", (7, 7), 10, 10, (3, 3), padding=1, groups=10),
    input_grad("3x3", (9, 8), 40, 72, (3, 3), padding=1),
    input_grad("5x3 dilated", (11, 13), 6, 10, (5, 3), padding=(2, 1), dilation=(2, 1)),
    input_grad("3 groups", (8, 8), 12, 24, (3, 3), padding=1, groups=3),
    input_grad("depthwise 3x3", (9, 8), 24, 24, (3, 3), padding=1, groups=24),
    input_grad("depthwise 5x5", (7, 9), 8, 8, (5, 5), padding=2, groups=8),
    input_grad("depthwise dilated", (9, 7), 12, 12, (3, 5), padding=4, dilation=2, groups=12),
    weight_grad("3x3", (14, 15), 64, 72, (3, 3), padding=1),
    weight_grad("3x3/2", (15, 14), 40, 100, (3, 3), stride=2, padding=1),
    weight_grad("1x1", (9, 7), 136, 64, (1, 1)),
    weight_grad("1x1/2", (13, 14), 64, 24, (1, 1), stride=2),
    weight_grad("linear", (37, 1), 33, 70, (1, 1)),
    weight_grad("stem 7x7/2", (17, 15), 3, 16, (7, 7), stride=2, padding=3),
    weight_grad("uneven", (11, 13), 6, 10, (3, 5), stride=(2, 3), padding=(2, 1), dilation=(3, 2)),
    weight_grad("2 groups", (6, 6), 32, 144, (3, 3), padding=1, groups=2),
    weight_grad("5 uneven groups", (6, 7), 15, 35, (3, 3), padding=1, groups=5),
    weight_grad("depthwise 3x3", (9, 8), 72, 72, (3, 3), padding=1, groups=72),
    weight_grad("depthwise 5x5/2", (14, 9), 20, 20, (5, 5), stride=2, padding=2, groups=20),
    weight_grad("depthwise 3x3/2", (15, 15), 36, 36, (3, 3), stride=2, padding=1, groups=36),
    weight_grad("depthwise 7x7", (5, 16), 12, 12, (7, 7), padding=3, groups=12),
    weight_grad("depthwise dilated", (9, 7), 24, 24, (3, 5), padding=4, dilation=2, groups=24),
    weight_grad("depthwise of 10", (7, 7), 10, 10, (3, 3), padding=2, dilation=2, groups=10),
    weight_grad("depthwise twice", (7, 7), 12, 24, (3, 3), padding=1, groups=12),
    weight_grad("1x1 image", (1, 1), 16, 17, (3, 3), padding=1),
    # Two convolutions, one sum; sizes that the tensor cores' tiles do not fit.
    joined("conv2d_shortcut", (14, 14), 64, 256, (28, 28, 128), stride=2),
    joined("conv2d_shortcut stride 1", (9, 8), 64, 136, (9, 8, 72)),
    joined("conv2d_shortcut 3x3", (7, 7), 64, 64, (13, 14, 40), kernel=3, stride=2),
    joined("conv2d_shortcut odd", (5, 5), 3, 7, (10, 9, 5), kernel=3, stride=2),
    # Sparse filters: every third row is empty.
    conv("sparse_conv2d 3x3", (9, 9), 48, 40, (3, 3), padding=1, sparsity=0.9, then="relu"),
    conv("sparse_conv2d 1x1", (7, 7), 130, 70, (1, 1), sparsity=0.8, then="gelu"),
    conv("sparse_conv2d stem", (20, 20), 3, 65, (7, 7), stride=2, padding=3, sparsity=0.5),
    conv("sparse_conv2d add_relu", (6, 6), 20, 33, (1, 1), sparsity=0.9, then="add_relu"),
    conv("sparse_conv2d silu", (7, 7), 20, 33, (1, 1), sparsity=0.8, then="silu"),
    conv("sparse_conv2d add", (6, 6), 20, 33, (1, 1), sparsity=0.95, then="add"),
    conv("sparse_conv2d groups", (6, 7), 15, 35, (3, 3), padding=1, groups=5, sparsity=0.7),
    conv("sparse_conv2d dilated", (9, 9), 8, 8, (3, 3), dilation=2, padding=1, sparsity=0.6),
    conv("sparse_conv2d of zeros", (4, 4), 8, 8, (3, 3), padding=1, sparsity=1.0),
    conv("sparse_conv2d of one number", (9, 8), 8, 8, (3, 3), padding=1, sparsity=1.0,
         spared=(2, 0, 5, 6)),
    conv("sparse_conv2d without zeros", (9, 8), 20, 24, (3, 3), padding=1, sparsity=0.0),
    # Several parts of the channels, the last one narrower than a vector; several blocks of pixels.
    conv("sparse_conv2d 3x3/2", (31, 30), 65, 33, (3, 3), stride=2, padding=1, sparsity=0.9,
         then="relu"),
    conv("sparse_conv2d 1x1/2", (15, 14), 257, 40, (1, 1), stride=2, sparsity=0.9),
    conv("sparse_conv2d many pixels", (56, 57), 129, 50, (1, 1), sparsity=0.9, then="add_relu"),
    conv("sparse_conv2d many rows", (40, 23), 17, 19, (3, 3), padding=1, sparsity=0.8, then="relu"),
    conv("sparse_conv2d 1x1 padded", (5, 6), 16, 17, (1, 1), padding=2, stride=3, sparsity=0.5),
    conv("sparse_conv2d uneven", (11, 13), 6, 10, (3, 5), stride=(2, 3), padding=(2, 1),
         dilation=(3, 2), sparsity=0.6),
    conv("sparse_conv2d wide padding", (3, 4), 5, 6, (2, 2), padding=4, sparsity=0.5),
    conv("sparse_conv2d 2 groups", (6, 6), 96, 64, (3, 3), padding=1, groups=2, sparsity=0.9),
    conv("sparse_conv2d depthwise", (9, 9), 40, 40, (3, 3), padding=1, groups=40, sparsity=0.5),
    *(conv(f"sparse_conv2d {q} pixels", (1, q), 8, 16, (1, 1), sparsity=0.5)
      for q in (1, 15, 16, 17, 129)),
    # Products.
    product("bmm scores", (3, 50, 64), (3, 13, 64), alpha=384**-0.5, transpose=True),
    product("bmm context", (3, 50, 13), (3, 13, 64)),
    product("bmm odd", (2, 7, 5), (2, 5, 3), alpha=0.5, bias=True, then="gelu"),
    product("bmm odd transposed", (2, 7, 5), (2, 3, 5), transpose=True, bias=True),
    product("bmm tiles", (2, 130, 72), (2, 72, 136), alpha=0.5, bias=True),
    product("bmm tiles transposed", (2, 130, 72), (2, 133, 72), transpose=True, then="gelu"),
    product("bmm one b", (4, 9, 20), (20, 70), shared=True, bias=True),
    product("bmm one b transposed", (4, 33, 72), (136, 72), transpose=True, shared=True, bias=True),
    product("bmm add", (2, 9, 20), (2, 20, 70), then="add"),
    product("bmm mul_sigmoid", (2, 9, 20), (2, 20, 70), bias=True, then="mul_sigmoid"),
    product("bmm hardswish", (2, 9, 20), (2, 20, 70), then="hardswish"),
    conv("conv2d depthwise silu", (6, 5), 20, 20, (3, 3), padding=1, groups=20, then="silu"),
    product("bmm add_relu", (2, 9, 20), (2, 70, 20), transpose=True, bias=True, then="add_relu"),
    product("bmm 1x1", (1, 1, 1), (1, 1, 1)),
    dense("linear", (50, 64), 192),
    dense("linear gelu", (50, 96), 384, "gelu"),
    dense("linear add", (13, 384), 96, "add"),
    dense("linear mish", (13, 40), 33, "mish"),
    dense("linear mul_gelu_grad", (50, 96), 384, "mul_gelu_grad"),
    dense("linear add_gelu_tanh", (13, 40), 33, "add_gelu_tanh"),
    dense("linear head", (320,), 1000),
    dense("linear few", (392,), 1000, few=True),
    dense("linear no bias", (17, 30), 70, bias=False),
    # Several tiles of each product, tiles that end within one, sizes that no tile fits.
    chained("conv2d_chain", (90, 71), 64, 256, 64),
    chained("conv2d_chain 128", (65, 67), 64, 256, 128),
    chained("conv2d_chain streams", (90, 92), 128, 512, 128),
    chained("conv2d_chain few", (5, 3), 128, 72, 128),
    chained("conv2d_chain odd", (5, 5), 12, 20, 7),
    chained("conv2d_chain 256", (128, 130), 256, 192, 256),
    chained("conv2d_shortcut_chain", (90, 71), 64, 256, 64, s=64),
    chained("conv2d_shortcut_chain few", (5, 3), 64, 72, 64, s=64),
    gated((14, 14), 240, 10, "silu", "sigmoid"),
    gated((7, 7), 1152, 48, "silu", "sigmoid"),
    gated((7, 7), 1088, 272, "silu", "sigmoid"),
    gated((90, 91), 128, 8, "silu", "sigmoid"),
    gated((1, 2), 8, 1, "silu", "sigmoid"),
    gated((28, 28), 72, 24, "relu", "hardsigmoid"),
    gated((3, 2), 4104, 3, "relu", "hardsigmoid"),
    gated((7, 9), 256, 16, "relu", "sigmoid", "add_relu"),
    gated((5, 3), 2056, 30, "relu", "sigmoid", "add_relu"),
    scattered(6, 40, 136),
    scattered(200, 7, 24),
    scattered(5, 9, 3, each=True),
    gathered("gather_rows norm", (14, 21), 96, (2, 7, 3, 7), (0, 2, 1, 3), (-3, -2), norms=True),
    gathered("gather_rows add and norm", (14, 21), 384, (2, 3, 7, 7), (0, 2, 1, 3), (3, 2),
             first=False, adds=True, norms=True),
    gathered("gather_rows add", (4, 6), 192, (2, 3, 4), (2, 0, 1), (1, 5), first=False, adds=True),
    gathered("gather_rows copy", (6, 5), 512, (5, 6), (1, 0), (4, 0)),
    gathered("gather_rows of a row", (1, 1), 8, (1,), (0,), norms=True),
    gathered("gather_rows many", (56, 56), 8, (8, 7, 8, 7), (0, 2, 1, 3), (-3, -3), adds=True),
    projections("qkv_linear", 197, 50, 384, 384),
    projections("qkv_linear 64", 300, 70, 64, 64),
    projections("qkv_linear odd", 9, 4, 12, 20),
    # Projections of a CvT block: one fused tile and several, lanes of 8 to 32, other kernels.
    project("depthwise_qkv 64", (14, 14), 64),
    project("depthwise_qkv token", (7, 9), 192, token=True),
    project("depthwise_qkv 384", (14, 14), 384, token=True),
    project("depthwise_qkv many tiles", (57, 115), 384, token=True),
    project("depthwise_qkv kernel 5", (9, 8), 24, kernel=5, padding_kv=2, stride_kv=1),
    project("depthwise_qkv 2 x 2", (2, 2), 64),
    project("depthwise_qkv 1 x 1", (1, 1), 80, kernel=1, padding_kv=0, stride_kv=1, token=True),
    project("depthwise_qkv no padding", (8, 7), 72, padding_kv=0, stride_kv=3),
    project("depthwise_qkv odd channels", (5, 6), 5, token=True),
    # Pools.
    pool("maxpool 3/2", (13, 12), 64, 3, stride=2, padding=1),
    pool("maxpool ceil", (12, 11), 5, (3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True),
    pool("maxpool dilated", (12, 12), 16, 3, stride=1, padding=1, dilation=2),
    pool("avgpool 3/2", (13, 12), 64, 3, stride=2, padding=1),
    pool("avgpool ceil", (12, 11), 5, (3, 2), stride=(2, 3), padding=(1, 1), ceil_mode=True),
    pool("avgpool inside", (9, 9), 24, 3, stride=2, padding=1, count_include_pad=False),
    pool("avgpool global", (7, 7), 512, None),
    pool_grad("max_pool2d_grad 3/2", (13, 12), 64, 3, stride=2, padding=1),
    pool_grad("max_pool2d_grad ceil", (12, 11), 5, (3, 2), stride=(2, 3), padding=(1, 0),
              ceil_mode=True),
    pool_grad("max_pool2d_grad dilated", (12, 13), 16, 3, stride=2, padding=1, dilation=(2, 3)),
    pool_grad("max_pool2d_grad apart", (9, 8), 12, (1, 2), stride=(3, 4)),
    pool_grad("max_pool2d_grad wide", (24, 28), 9, (9, 10), stride=3, padding=(4, 5), dilation=2),
    pool_grad("avg_pool2d_grad 3/2", (13, 12), 64, 3, stride=2, padding=1),
    pool_grad("avg_pool2d_grad ceil", (12, 11), 5, (3, 2), stride=(2, 3), padding=(1, 1),
              ceil_mode=True),
    pool_grad("avg_pool2d_grad inside", (9, 9), 24, 3, stride=2, padding=1,
              count_include_pad=False),
    pool_grad("avg_pool2d_grad 2", (8, 9), 9, 2),
    # Reductions: sizes of no vector and one more or less, rows in parts, several slabs.
    *(
        reduction(kind, shape, axes)
        for kind, shape, axes in (
            ("mean", (14, 14, 672), (1, 2)), ("mean", (112, 112, 32), (1, 2)),
            ("mean", (49, 192), (1,)), ("mean", (5, 7, 35), (1, 2)), ("mean", (4, 33), (2,)),
            ("mean", (2, 36864), (1,)),  # few rows: each thread has one result
            ("sum", (129, 130), (1,)), ("sum", (3, 2049), (2,)), ("sum", (70_001,), (1,)),
            ("sum", (3, 4, 5, 6), (1, 3)), ("sum", (1, 6), (1,)), ("sum", (9, 3), (1, 2)),
            ("amax", (6, 5, 40), (1, 2)), ("amax", (7, 100), (2,)), ("amax", (300, 7), (1,)),
            ("amin", (200, 24), (1,)), ("amin", (2, 63), (2,)),
        )
    ),
    # Expressions that are reduced: by channel, by row, and one row for all.
    terms("sum", (1,), "x0 ; x0 x1 x2 sub mul", lambda g, x, c: (g, g * (x - c)),
          (1200, 72), (1200, 72), vectors=[(72,)]),
    terms("mean", (2,), "x0 x1 sub x2 mul", lambda x, m, w: ((x - m) * w,),
          (9, 80), (9, 1), vectors=[(80,)]),
    terms("sum", (1,), "x0 x1 mul x2 mul ; x0 ; x0 x1 add", lambda g, x, s: (g * x * s, g, g + x),
          (50, 19), (50, 19), (50, 1)),
    terms("sum", (2,), "x0 x1 mul", lambda y, dy: (y * dy,), (6, 197), (6, 197)),
    terms("amax", (1, 2), "x0 x1 sub abs", lambda a, b: ((a - b).abs(),), (7, 5, 33), (1, 1, 33)),
    # What a batch norm computes of its sums: in vectors, in part of one, number by number.
    *(
        finished("mean", (1,), "x0 ; x0 x0 mul",
                 "x1 x0 x0 mul sub 0.0 inf clamp 1e-05 add rsqrt x2 mul ; x3 x0"
                 " x1 x0 x0 mul sub 0.0 inf clamp 1e-05 add rsqrt x2 mul mul sub ; x0",
                 normed, (rows, c), (1, c), (1, c), behind=2)
        for rows, c in ((150, 1), (40, 7), (700, 64), (60, 384), (1200, 72))
    ),
    finished("sum", (1,), "x0 ; x0 x1 mul", "x0 ; x1 x2 mul ; x1 x2 mul x2 mul tanh ; x0 x2 mul",
             norm_gradient, (30, 40), (30, 40), (1, 40), behind=1),
    finished("amax", (1,), "x0 abs", "x0 1.0 add log",
             lambda x: [(x.abs().amax(1, True) + 1).log()], (50, 24)),
    # Permutes that keep rows: of vectors, of less; windows, heads, pixels.
    permuted((2, 7, 2, 7, 24), 0, 1, 3, 2, 4, 5),
    permuted((49, 3, 4, 8), 2, 0, 3, 1, 4),
    permuted((300, 70, 24), 0, 2, 1, 3),
    permuted((5, 7, 6), 0, 2, 1, 3),
    permuted((5, 7, 3), 2, 1, 0, 3),
    # Those that turn matrices over: whole tiles and parts, vectors of both sides, narrow images.
    permuted((128, 64), 0, 2, 1),
    permuted((196, 72), 0, 2, 1),
    permuted((65, 129), 0, 2, 1),
    permuted((2, 49, 50), 0, 1, 3, 2),
    permuted((24, 9, 12), 0, 2, 3, 1),
    permuted((30, 20, 3), 0, 3, 1, 2),
    permuted((3, 30, 20), 0, 2, 3, 1),
    permuted((33, 40), 2, 1, 0),
    permuted((40, 2, 16), 3, 2, 0, 1),
    permuted((2, 3, 17, 5, 18), 5, 3, 1, 0, 2, 4),
    permuted((1, 9, 1, 11), 0, 4, 3, 1, 2),
    permuted((9, 1, 8), 0, 2, 1, 3),
    # Elementwise, rows.
    *(pointwise(f"x0 {name}", op, (3, 33)) for name, op in UNARY.items()),
    *(pointwise(f"x0 x1 {name}", op, (3, 7), (3, 7), spread=1) for name, op in BINARY.items()),
    # How values broadcast: tasks and vectors that end in a row, gates, vectors, one number.
    pointwise("x0 x1 mul", torch.mul, (9, 11, 24), (1, 1, 24)),
    pointwise("x0 x1 add relu", lambda a, b: (a + b).relu(), (200, 100), (200, 1)),
    pointwise("x0 x1 mul x2 add", lambda a, b, c: a * b + c, (9, 40), vectors=[(40,), (40,)]),
    pointwise("x0 x1 div", torch.div, (50, 3), vectors=[(3,)]),
    pointwise("x0 x1 sub", torch.sub, (1, 2, 1, 4, 5), (3, 1, 6, 4, 1), spread=1),
    pointwise("x0 x1 sigmoid mul", lambda a, b: a * b.sigmoid(), (70001,), (70001,)),
    pointwise(
        "x0 x1 mul x2 sub x3 gt x4 0.0 where x5 mul x6 add x7 mul",
        lambda a, b, c, d, e, f, g, h: (torch.where(a * b - c > d, e, 0) * f + g) * h,
        (5, 16), (5, 1), (1, 16), (1, 1), vectors=[(16,), (1,), (16,), (16,)],
    ),
    masked("pointwise masks", (5, 40), (5, 1)),
    # Members of one number, of less than a vector, of odd sizes, and of several chunks.
    foreach("x0 x1 sigmoid mul", lambda a, b: a * b.sigmoid(), 1, 7, 64, 33, 20003, 8),
    foreach_masked(5, 4096, 1, 129),
    foreach_counted(1, 3, 70),
    *(
        same(f"{op.__name__} {c}", (5, c), op, torch_op)
        for (op, torch_op), c in itertools.product(
            [
                (nodes.softmax, lambda x: x.softmax(-1)),
                (nodes.log_softmax, lambda x: x.log_softmax(-1)),
            ],
            (1, 2, 31, 64, 1000, 4096),
        )
    ),
    *(softmax_gradient(c) for c in (1, 2, 31, 64, 1000, 4096)),
    same("softmax -inf", (4, 49), nodes.softmax, lambda x: x.softmax(-1), change=_some_infinite),
    same("log_softmax -inf", (4, 49), nodes.log_softmax, lambda x: x.log_softmax(-1),
         change=_some_infinite),
    # Rows in the registers of 8, 16 or 32 lanes, all of them busy or not, and rows that are not.
    *(
        norm(f"layernorm {c}", (7, c), 1e-12 if c == 384 else 1e-5)
        for c in (1, 30, 64, 72, 192, 384, 768, 1000, 1024, 1032)
    ),
    norm("layernorm_first", (5, 192), 1e-5, first=True),
    # Their gradients, also of rows that take a block, and of more than a vector's threads hold.
    *(norm_grad(c) for c in (3, 5, 33, 72, 192, 384, 1000, 1032, 2056, 4096, 4104)),
    norm_grad(64, (20, 30)),
    norm_grad(768, scaled=False),
    # Mixed dtypes, as under autocast.
    norm_between(192, "float32", ""), norm_between(30, "", "float32"),
    norm_grad(384, given="float32"), norm_grad(64, given="float32", made="float32"),
    norm_grad(33, made="float32"),
    *(rms((5, c)) for c in (3, 64, 100, 384, 1030)),
    # Groups of a vector, less, several and parts of one; all of an image, and single channels.
    grouped((14, 14, 256), 32, "relu"),
    grouped((9, 7, 64), 32, "silu"),
    grouped((10, 10, 320), 1),
    grouped((33, 31, 96), 1),
    grouped((12, 11, 168), 8),
    grouped((7, 5, 35), 5),
    grouped((6, 6, 51), 51),
    grouped((64, 64, 40), 40),
    grouped((49, 64), 4, "relu"),
    grouped((768,), 12),
    grouped((1200,), 1),
    rolled((14, 14, 96), (-3, -3), (1, 2)),
    rolled((5, 9, 7, 11), (2, 30), (2, 4)),
    rolled((6, 33), (-8,), (1,)),
    *(
        Case(
            f"concat {axis} {' '.join(map(str, shapes))}",
            shapes,
            {},
            lambda _, *x, axis=axis: nodes.concat(x, axis),
            lambda _, *x, axis=axis: torch.cat(x, axis),
        )
        for axis, shapes in (
            (3, [(5, 7, 96), (5, 7, 32)]), (-1, [(6, 3), (6, 5), (6, 1)]),
            (1, [(2, 9, 8), (1, 9, 8), (4, 9, 8), (3, 9, 8)]),
            (2, [(3, 2, 4), (3, 1, 4), (3, 5, 4), (3, 1, 4), (3, 7, 4), (3, 2, 4)]),
            (2, [(3, 2, 4), *[(3, i, 4) for i in range(1, 10)]]),
        )
    ),
    concatenated(
        "x0 x1 mul x2 add relu", lambda x, a, b: (x * a + b).relu(), (5, 7, 96), (5, 7, 32)
    ),
    concatenated(
        "x1 x0 sub x2 mul x3 add", lambda x, a, b, c: (a - x) * b + c, (6, 3), (6, 40), (6, 1)
    ),
    concatenated("x0 silu", F.silu, *[(3, 2, 8 * i) for i in range(1, 12)]),
    classed("class_token", (9, 20)),
    classed("class_token norm", (196, 384), norms=True),
    *(classed(f"class_token norm {c}", (5, c), norms=True) for c in (8, 392)),
    # Tiles of attention: 128 or 32 queries, 64 keys (a GPU); 192 or 128 queries, 64, 80 or 112 keys
    # (Hopper); 96 in sixes, 64 keys (a CPU).
    attend("attention 64", 50, 13, 3, 64, 192**-0.5),
    attend("attention one key", 37, 1, 2, 64),
    attend("attention one query", 1, 70, 1, 64),
    attend("attention 64 keys", 129, 64, 2, 64),
    attend("attention 65 keys", 97, 65, 1, 64),
    attend("attention 340 keys", 200, 340, 1, 64),
    attend("attention many heads", 128, 50, 140, 64),
    attend("attention many queries", 4500, 145, 4, 64),
    attend("attention many queries and keys", 1100, 330, 16, 64),
    *(attend(f"attention {d}", 67, 150, 2, d) for d in (1, 16, 20, 32, 80, 96, 128, 160)),
    attend("attention many heads of 32", 256, 129, 140, 32),
    attend("attention many heads of 96", 65, 129, 140, 96),
    attend("attention many heads of 128", 65, 129, 140, 128),
    *(attend(f"attention many heads of {d}, one tile", 129, 50, 140, d) for d in (32, 96, 128)),
    *(attend(f"attention many queries of {d}", 2300, 330, 8, d) for d in (32, 96, 128)),
    attend("attention sharp", 65, 33, 2, 64, 4.0),
    *(attend(f"attention {d} scale 0", 65, 70, 2, d, 0.0) for d in (24, 64)),
    attend("attention bias", 197, 197, 3, 64, bias=(1, 3, 197)),
    attend("attention windows", 49, 49, 3, 32, windows=4, bias=(4, 3, 49)),
    attend("attention windows of all heads", 49, 49, 3, 32, windows=4, bias=(4, 1, 49)),
    attend("attention many windows", 49, 49, 12, 32, windows=64, bias=(64, 12, 49)),
    attend("attention rows hidden", 70, 150, 2, 64, bias=(1, 1, 70), hidden=True),
    attend("attention tiles hidden", 70, 150, 2, 64, bias=(1, 1, 70), tiles=True),
    attend("attention rows hidden in many heads", 150, 171, 150, 64, bias=(1, 1, 150), hidden=True),
    attend("attention keys hidden", 33, 150, 2, 64, keys=True),
    attend("attention keys hidden in many heads", 130, 151, 140, 64, keys=True),
    attend("attention a row for all", 60, 99, 2, 32, bias=(1, 1, 1)),
    attend("attention causal", 150, 150, 2, 64, causal=True),
    attend("attention causal, fewer queries", 70, 150, 2, 24, causal=True),
    attend("attention causal, fewer keys", 300, 130, 2, 96, causal=True),
    attend("attention causal in many heads", 200, 200, 140, 64, causal=True),
    attend("attention causal with a bias", 120, 120, 2, 64, bias=(1, 2, 120), causal=True),
    *(attend(f"attention {d} with a bias", 67, 151, 2, d, bias=(1, 2, 67))
      for d in (6, 24, 48, 80, 96, 128, 256)),
    *(attend(f"attention many heads of {d}", 130, 67, 150, d) for d in (20, 24, 36, 80, 88)),
    *(attend(f"attention {d}", 67, 150, 2, d) for d in (6, 24, 36, 48, 60, 72, 256)),
    # Tiles of its gradients: 48 queries by 64 keys (a CPU); 64 by 64 or 32 (a GPU).
    attend_grad("64", 197, 197, 3, 64),
    attend_grad("one query", 1, 70, 2, 64),
    attend_grad("one key", 37, 1, 2, 64),
    attend_grad("32 one tile", 48, 64, 2, 32),
    attend_grad("96", 49, 130, 2, 96),
    attend_grad("20", 37, 65, 1, 20),
    attend_grad("causal", 150, 150, 2, 64, causal=True),
    attend_grad("causal, fewer keys", 130, 37, 1, 64, causal=True),
    attend_grad("bias", 65, 67, 2, 64, bias=(1, 2, 65)),
    attend_grad("bias of all heads, causal", 70, 150, 2, 32, bias=(1, 1, 70), causal=True),
    attend_grad("a row for all", 60, 99, 2, 64, bias=(1, 1, 1)),
    attend_grad("sharp", 65, 33, 1, 64, scale=4.0),
]  # fmt: skip


def build_graph(
    cases: Sequence[Case],
    device: DeviceRef,
    dtype: DType,
    *,
    tf32: bool = True,
    kernels: KernelLibrary | None = None,
) -> tuple[Graph, list[Parameters]]:
    """Builds one graph of all the cases, their batch symbolic; ``kernels`` stand for the ops."""
    types = [
        TensorType(DType.uint8 if c.levels else dtype, ["batch", *shape], device=device)
        for c in cases
        for shape in c.inputs
    ]
    parameters = []
    extensions = [] if kernels else [cache.library(gpu=device.is_gpu())]
    with Graph(
        "cases", input_types=types, custom_extensions=extensions, kernel_library=kernels
    ) as graph:
        inputs = iter(value.tensor for value in graph.inputs)
        outputs = []
        for i, case in enumerate(cases):
            # The case's number keeps the names of the weights apart.
            tensors = {f"{i}.{name}": array for name, array in case.data(1)[1].items()}
            w = Parameters(tensors, device, dtype, tf32=tf32)
            scoped = w.at(str(i))
            outputs.append(case.build(scoped, *itertools.islice(inputs, len(case.inputs))))
            parameters.append(scoped)
        graph.output(*outputs)
    return graph, parameters


def draw(cases: Sequence[Case], batch: int, dtype: DType, device: Device) -> list[Buffer]:
    """Draws the inputs of the graph of all the cases, on ``device``."""
    inputs = []
    for case in cases:
        arrays = map(torch.from_numpy, case.data(batch)[0])
        inputs += [a if case.levels else a.to(TORCH[dtype]) for a in arrays]
    return [Buffer.from_dlpack(x).to(device) for x in inputs]


def check(
    case: Case,
    ours: torch.Tensor,
    batch: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    tf32: bool = False,
    absolute: float = 0.0,
) -> float:
    """Compares with torch in float64; raises AssertionError beyond the bound.

    The bound is twice the error that torch makes at this dtype, 8 ulp of float32, or 32 of float64,
    of the largest number, and ``absolute``. NaN and infinities are where torch has them, in float64
    or at this dtype. With ``tf32`` torch's error is that of operands rounded to TF32.

    Returns:
        Our largest error over the largest number of the result.
    """
    arrays, weights = case.data(batch)
    # What the op is given: both sides start from the rounded numbers (bias and norms are float32).
    inputs = [torch.from_numpy(a).to(device, dtype) for a in arrays]
    exact = {
        k: torch.from_numpy(v).to(device) if _kept(k) else torch.from_numpy(v).to(device, dtype)
        for k, v in weights.items()
    }
    truth = case.reference({k: v.double() for k, v in exact.items()}, *(x.double() for x in inputs))
    with RoundedProducts() if tf32 else contextlib.nullcontext():
        theirs = case.reference({k: v.to(dtype) for k, v in exact.items()}, *inputs).double()
    ours = ours.to(device).double()
    assert ours.shape == truth.shape, (
        f"{case.name}: {tuple(ours.shape)} is not {tuple(truth.shape)}"
    )
    if truth.numel() == 0:
        return 0.0
    finite = truth.isfinite() & ours.isfinite()
    fits = [(ours == t) | (ours.isnan() & t.isnan()) for t in (truth, theirs)]
    wrong = torch.where(
        ours.isfinite(), ~(truth.isfinite() | theirs.isfinite()), ~(fits[0] | fits[1])
    )
    assert not wrong.any(), (
        f"{case.name}: {wrong.sum()} of {wrong.numel()} are finite where torch's are not, or the"
        f" reverse: {ours[wrong][:3].tolist()} instead of {truth[wrong][:3].tolist()}, first at"
        f" {wrong.nonzero()[0].tolist()}"
    )
    if not finite.any():
        return 0.0
    scale = truth[finite].abs().max().item()
    error = (ours - truth)[finite].abs().max().item()
    rounding = (theirs - truth)[finite].nan_to_num(0, 0, 0).abs().max().item()
    ulp = torch.finfo(torch.float32).eps
    if dtype == torch.float64:  # of which torch's own error is not known
        ulp = 4 * torch.finfo(dtype).eps
    allowed = 2 * rounding + 8 * ulp * scale + absolute
    assert error <= allowed, f"{case.name}: error {error:.3g} but torch's allows {allowed:.3g}"
    return error / scale if scale else error


def _kept(name: str) -> bool:
    """Tells whether a weight stays float32 at every dtype."""
    return name.endswith("bias") or name == "weight"


ON_CPU = [
    gathered("gather_rows odd", (2, 3), 37, (3, 2), (1, 0), (1, 1), adds=True, norms=True),
    gathered("gather_rows odd copy", (3, 3), 5, (9,), (0,), (-1, 2), first=False),
    classed("class_token norm odd", (3, 37), norms=True),
]
"""Rows of a length that only a CPU takes."""
ON_GPU = [
    input_grad("depthwise 3x3/2", (15, 14), 96, 96, (3, 3), stride=2, padding=1, groups=96),
    input_grad("depthwise 5x5/2", (10, 9), 64, 64, (5, 5), stride=2, padding=2, groups=64),
    input_grad("depthwise 7x7/2", (11, 16), 8, 8, (7, 7), stride=2, padding=3, groups=8),
    input_grad("depthwise 3x3/3", (10, 12), 64, 64, (3, 3), stride=3, padding=1, groups=64),
    input_grad(
        "depthwise uneven",
        (11, 13),
        12,
        12,
        (3, 5),
        stride=(2, 3),
        padding=(2, 1),
        dilation=(1, 2),
        groups=12,
    ),
    input_grad("depthwise 1x1/3", (8, 10), 7, 7, (1, 1), stride=3, groups=7),
]
"""What a CPU puts together of other ops; there tests/graphs/test_lower.py checks it."""
ON_HOPPER = [
    mlp("layernorm_mlp", 8500, 64, 256),
    mlp("layernorm_mlp 192", 8500, 192, 768),
    mlp("layernorm_mlp few", 50, 192, 768),
    mlp("layernorm_mlp narrow", 8300, 64, 72),
    mlp("layernorm_mlp behind a layer", 8500, 64, 256, measured=True),
    mlp("layernorm_mlp few behind a layer", 50, 192, 768, measured=True),
    around_norm("normed_linear gelu", (13,), 384, 384, 1536, then="gelu"),
    around_norm("normed_linear", (197,), 384, 384, 384, mean=3.0),
    around_norm("normed_linear many gelu", (4500,), 384, 384, 1536, then="gelu"),
    around_norm("normed_linear many", (8300,), 96, 192, 192, bias=False),
    around_norm("normed_linear 96 silu", (77,), 96, 96, 288, then="silu"),
    around_norm("normed_linear 64 relu", (1,), 64, 64, 72, then="relu"),
    around_norm("normed_linear 32", (3,), 8, 32, 8),
    around_norm("normed_linear 160", (65,), 200, 160, 136, bias=False),
    around_norm("normed_linear 1536", (50,), 1024, 1536, 392, then="gelu", mean=1.0),
    around_norm("normed_linear thrice", (49,), 128, 128, 128, 40, 256, then="gelu_tanh"),
    around_norm("normed_linear of images", (7, 9), 96, 96, 384, then="hardswish"),
    around_norm("linear_moments", (67,), 384, 224, 8, whole=True),
    around_norm("linear_moments many", (8300,), 128, 160, 24, whole=True),
    projected("attention_linear", 197, 50),
    projected("attention_linear one key", 1, 1, bias=False),
    projected("attention_linear many", 6400, 56, sharp=4.0),
    projected("attention_linear many, three images", 2200, 37),
    projected("attention_linear of a head", 70, 200, heads=1),
    projected("attention_linear of a head, many", 6010, 130, heads=1, sharp=4.0),
    averaged("conv2d_mean add_relu", (7, 7), 512, 2048, "add_relu"),
    averaged("conv2d_mean silu", (7, 7), 320, 1280, "silu", keepdim=False),
    averaged("conv2d_mean whole tiles", (8, 8), 1024, 64),
    averaged("conv2d_mean more channels", (7, 7), 1032, 72, "relu"),
    averaged("conv2d_mean more pixels", (5, 13), 64, 40, "add"),
    averaged("conv2d_mean one pixel", (1, 1), 8, 8, "0.0 6.0 clamp"),
    along_tokens("token_linear gelu", 196, 768, 384, "gelu"),
    along_tokens("token_linear add", 384, 768, 196, "add"),
    along_tokens("token_linear many", 200, 8200, 130, "add_relu"),
    along_tokens("token_linear odd", 65, 72, 129),
    along_tokens("token_linear of a token", 1, 8, 1),
    quantized("quantized_conv2d 3x3", (9, 7), 64, 80, 3, Grid(2.0**-5, 0), Grid(0.25, -130)),
    quantized("quantized_conv2d 1x1", (14, 5), 208, 144, 1, Grid(2.0**-5, -9), Grid(0.25, -99)),
    quantized("quantized_conv2d to floats", (9, 7), 144, 72, 3, Grid(2.0**-5, 0), None),
    quantized_floats("quantized_conv2d of e4m3 3x3", (9, 7), 64, 80, 3, Float8(2.0**-6)),
    quantized_floats("quantized_conv2d of e4m3 1x1", (14, 5), 208, 144, 1, Float8(2.0)),
    quantized_floats("quantized_conv2d of e4m3 to floats", (9, 7), 144, 80, 3, None),
    # So many pixels that gemm/turned.mojo takes them.
    quantized("quantized_conv2d of 64", (430, 56), 64, 64, 3, Grid(2.0**-5, 0), Grid(0.25, -130)),
    quantized_floats("quantized_conv2d of e4m3 64", (430, 56), 64, 64, 3, Float8(2.0**-6)),
    quantized_gelu("quantized_linear gelu", 65, 144, 80, Grid(0.25, -9), Grid(2.0**-5, -3)),
    quantized_gelu("quantized_linear gelu of e4m3", 650, 208, 144, Float8(0.25), Float8(2.0**-7)),
    quantized_projections("quantized_qkv_linear of e4m3", 197, 50, 384, 384),
    quantized_projections("quantized_qkv_linear of e4m3 64", 300, 70, 64, 64),
    quantized_shortcut("quantized_conv2d_shortcut", (9, 7), 64, 80, 192, Grid(2.0**-5, 0),
                       Grid(2.0**-4, -130)),
    quantized_shortcut("quantized_conv2d_shortcut many", (57, 53), 128, 144, 208,
                       Grid(2.0**-5, 0), Grid(2.0**-4, -98)),
    quantized_shortcut_floats("quantized_conv2d_shortcut of e4m3", (9, 7), 144, 80, 208,
                              Float8(2.0**-6)),
    quantized_chain("quantized_conv2d_chain", (90, 71), 64, 256, 64),
    quantized_chain("quantized_conv2d_chain 128", (65, 67), 64, 240, 128),
    quantized_chain("quantized_conv2d_chain 512", (65, 67), 128, 512, 128),
    quantized_chain("quantized_conv2d_chain few", (5, 3), 128, 80, 128),
    quantized_shortcut_chain("quantized_conv2d_shortcut_chain", (90, 71), 256),
    quantized_shortcut_chain("quantized_conv2d_shortcut_chain few", (5, 3), 80),
    quantized_chain_floats("quantized_conv2d_chain of e4m3", (65, 67), 64, 256, 128),
    attend("attention to uint8", 67, 150, 2, 64, result=Grid(2.0**-6, -130)),
    attend("attention to uint8, many heads", 200, 150, 140, 64, result=Grid(2.0**-6, -97)),
    attend("attention to uint8, many heads of 32", 200, 150, 140, 32, result=Grid(2.0**-5, -97)),
    attend("attention to uint8 with a bias", 49, 49, 12, 32, windows=64, bias=(64, 12, 49),
           result=Grid(2.0**-6, -130)),
    attend("attention to e4m3", 67, 150, 2, 64, result=Float8(2.0**-9)),
    attend("attention to e4m3, many heads", 200, 150, 140, 64, result=Float8(2.0**-9)),
    attend("attention to e4m3, many heads of 96", 130, 67, 140, 96, result=Float8(2.0**-8)),
    attend("attention to e4m3, 36", 130, 67, 150, 36, result=Float8(2.0**-8)),
    attend("attention to e4m3, one tile", 129, 50, 140, 64, result=Float8(2.0**-7)),
    attend("attention to e4m3 with a bias", 150, 171, 150, 64, bias=(1, 150, 150), hidden=True,
           result=Float8(2.0**-9)),
    attend("attention to e4m3, few with a bias", 67, 151, 2, 48, bias=(1, 2, 67),
           result=Float8(2.0**-9)),
    # A map of 3 rows, so that 256 tiles of 64 channels are small: hopper.mojo takes them.
    *(
        project(f"depthwise_qkv {name} {kind}", size, c, token=token, to=to)
        for kind, to in PROJECTED.items()
        for name, size, c, token in (
            ("64", (14, 14), 64, False), ("64 many tiles", (3, 7150), 64, True),
            ("384", (14, 14), 384, True), ("384 many tiles", (57, 115), 384, False),
        )
    ),
    stem_of_bytes("stem_maxpool", (37, 90), 64),
    stem_chained("stem_maxpool_conv2d", (45, 224)),
    stem_chained("stem_maxpool_conv2d in parts", (33, 39)),
    stem_of_bytes("stem_conv2d", (30, 21), 40),
    conv("packed tiles 3x3", (9, 9), 72, 136, (3, 3), padding=1, sparsity=0.9, then="add_relu",
         format="tiles"),
    conv("packed tiles 1x1", (14, 13), 200, 72, (1, 1), sparsity=0.7, then="relu", format="tiles"),
    conv("packed tiles of zeros", (4, 4), 64, 64, (3, 3), padding=1, sparsity=1, format="tiles"),
    conv("packed two_four 3x3", (9, 9), 64, 136, (3, 3), padding=1, sparsity=0, then="relu",
         format="two_four"),
    conv("packed two_four 1x1", (14, 13), 200, 72, (1, 1), sparsity=0, then="add_relu",
         format="two_four"),
    conv("packed two_four 3x3/2", (15, 14), 72, 40, (3, 3), stride=2, padding=1, sparsity=0.8,
         then="gelu", format="two_four"),
    conv("packed blocks 3x3", (9, 9), 128, 136, (3, 3), padding=1, sparsity=0.7, then="add_relu",
         format="blocks"),
    conv("packed blocks of zeros", (4, 4), 64, 64, (3, 3), padding=1, sparsity=1,
         format="blocks"),
    conv("packed two_four of zeros", (4, 4), 64, 64, (3, 3), padding=1, sparsity=1,
         format="two_four"),
    conv("packed blocks 1x1/2", (15, 14), 200, 72, (1, 1), stride=2, sparsity=0.5, then="relu",
         format="blocks"),
    conv("packed blocks 32 groups", (9, 9), 128, 128, (3, 3), padding=1, groups=32, sparsity=0,
         then="relu", format="blocks"),
    conv("packed blocks 13 groups/2", (9, 9), 104, 104, (3, 3), stride=2, padding=1, groups=13,
         sparsity=0, format="blocks"),
    conv("packed blocks 3 uneven groups", (7, 6), 72, 216, (3, 3), padding=1, groups=3, sparsity=0,
         then="add_relu", format="blocks"),
]  # fmt: skip
"""What runs on Hopper's tensor cores alone: norms between products, tokens where they lie, packed
filters, 8 bits."""
