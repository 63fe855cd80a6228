"""Products of rounded activations and weights become products of 8 bits.

A program that is quantised says so in floats (graphs/quantize.py): ``fake_quantize`` rounds what a
product reads, and ``fake_quantize_filter`` its weights. Here these become integers, and are stored
as such, where a device has kernels for them: a CPU, and Hopper. That has them for floats of 8 bits,
too, which need no zero point. Comments and names say integers and bytes of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from max.dtype import DType

from maxvision.graphs.arrange import is_aligned, is_depthwise
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import Array, filter_scales
from maxvision.graphs.passes import heads
from maxvision.graphs.passes.fuse import activation, is_activation
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.quantize import GROUP, STEPS, STORED, Float8, Grid, Rounding, rounding_of
from maxvision.graphs.shapes import sides
from maxvision.graphs.types import HALVES

PRODUCTS = {"conv2d": "quantized_conv2d", "linear": "quantized_linear"}
"""The op in 8 bits of each product."""
STEMS = ("stem_maxpool", "stem_conv2d")
"""Ops on pixels that compute in 16 bits and can store bytes."""
KEEPING = ("max_pool2d", "reshape", "permute")
"""Ops that give numbers of their input, and so run on bytes as they do on what these stand for."""


def eight_bit(program: Program, on: Backend) -> Program:
    """Makes products that read rounded values ones of 8 bits, where a device has them.

    A rounded value is stored once, in 8 bits, for all that read it. Where nothing else reads a
    product's result, and its residual is stored so too, it stores its result rounded itself. What
    is rounded to levels that it has already, such as a max pool of a rounded value, is a value of
    bytes too. A stem whose result is only rounded stores that. On a CPU a product takes in a sum
    that its rounded result goes to: see ``_sums``.
    """
    if not (on.is_hopper or (not on.is_gpu and on.dtype == "float32")):
        return program
    products = {node.output: node for node in program.nodes if _takes(program, node, on)}
    if not on.is_gpu and (pools := _pools(program, products)):
        program = pools
        products = {node.output: node for node in program.nodes if node.output in products}
    sums = {} if on.is_gpu else _sums(program, products)
    asked = [value for node in products.values() for value in (node.inputs[0], *node.inputs[3:])]
    asked += [made.output for value in products if (made := program.only_user(value))]
    asked += [*sums, *(each.product.inputs[3] for each in sums.values())]
    inner = {each.rounding.output for each in sums.values()}
    rounded: dict[str, Rounding] = {}
    while asked:
        value = asked.pop(0)
        grid = _grid(program, value)
        if not on.is_gpu and isinstance(grid, Float8):
            continue
        if grid and value not in rounded and value not in inner:
            rounded[value] = grid
            if _keeps(program, value):
                asked.append(program.producers[value].inputs[0])
    return _Rewriting(program, products, sums, rounded, on).done()


def _takes(program: Program, node: Node, on: Backend) -> bool:
    """Tells whether there is a kernel in 8 bits for a product."""
    if node.op not in PRODUCTS or node.at_load or "format" in node.attributes or node.dtype:
        return False
    x, weight = node.inputs[:2]
    grid = _grid(program, x)
    return (
        weight in program.constants
        and grid is not None
        and _rounded_to(program, weight) == grid.factor
        and (_hopper_takes(program, node, grid) if on.is_gpu else _cpu_takes(program, node, grid))
        and program.types[x].dtype == on.dtype
        and (node.op == "linear" or node.attributes.get("layout") == "NHWC")
    )


def _cpu_takes(program: Program, node: Node, grid: Rounding) -> bool:
    """Tells whether the channels of a group can be multiplied: four at once, or one by one.

    Pixels get as many when they are normalised. Of floats of 8 bits there is no kernel.
    """
    if isinstance(grid, Float8):
        return False
    f, c, *window = program.shape(node.inputs[1])
    groups = node.attributes.get("groups", 1)
    return (
        c % GROUP == 0
        or is_depthwise((*window, c, f), groups)  # type: ignore[arg-type]
        or (groups == 1 and _pixels(program, node.inputs[0]) is not None)
    )


def _pixels(program: Program, value: str) -> Node | None:
    """Finds what normalises the pixels that are rounded to a value, and nothing else."""
    rounding = program.producers[value]
    node = program.producers.get(rounding.inputs[0])
    if node is None or node.op != "normalize" or program.only_user(node.output) is not rounding:
        return None
    whole = program.types[node.inputs[0]].dtype == "uint8" and node.dtype == ""
    products = all(
        user.op == "conv2d"
        and user.attributes.get("groups", 1) == 1
        and bool(_rounded_filter(program, user.inputs[1]))
        for user in program.users.get(value, ())
    )
    return node if whole and products and value not in program.outputs.values() else None


def _pools(program: Program, products: Mapping[str, Node]) -> Program:
    """Rounds what products give before it goes to a max pool, and not behind that: it is the same.

    So the pool reads bytes.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    for value in products:
        pool = program.only_user(value)
        rounding = program.only_user(pool.output) if pool and pool.op == "max_pool2d" else None
        if pool and rounding and Grid.read(rounding):
            before = free(taken, f"{value}.rounded")
            rewrite.replace(
                [pool, rounding],
                replace(rounding, inputs=(value,), outputs=(before,)),
                replace(pool, inputs=(before,), outputs=rounding.outputs),
            )
    return rewrite.done()


class _Sum(NamedTuple):
    """A product whose rounded result is added to a rounded residual, before that is rounded."""

    product: Node
    """With the residual, the epilogue, and the levels of what the residual is added to."""
    bare: Node
    """The product alone."""
    rounding: Node
    """Of its result, before the sum."""
    behind: tuple[Node, ...]
    """The sum, and perhaps an activation."""

    @property
    def gone(self) -> tuple[Node, ...]:
        """What the product takes in, itself among it."""
        return self.bare, self.rounding, *self.behind


def _sums(program: Program, products: Mapping[str, Node]) -> dict[str, _Sum]:
    """Finds the sums that products can take in, by what they are rounded to."""
    found: dict[str, _Sum] = {}
    for node in program.nodes:
        if node.op != "add" or len(node.inputs) != 2:
            continue
        following = program.only_user(node.output)
        last = [following] if following and is_activation(following) else []
        result = program.only_user(last[0].output) if last else following
        if result is None or Grid.read(result) is None:
            continue
        for own, residual in (node.inputs, node.inputs[::-1]):
            rounding = program.producers.get(own)
            grid = Grid.read(rounding) if rounding else None
            bare = products.get(rounding.inputs[0]) if rounding else None
            if (
                rounding is None
                or grid is None
                or bare is None
                or program.only_user(bare.output) is not rounding
                or program.only_user(own) is not node
                or len(bare.inputs) > 3
                or saturating(bare, grid) != "none"
                or not isinstance(_grid(program, residual), Grid)
                or program.types[residual] != program.types[own]
            ):
                continue
            product = replace(
                bare.with_attributes(
                    epilogue="_".join(["add", *map(activation, last)]),
                    rounded_scale=grid.scale,
                    rounded_low=grid.low,
                ),
                inputs=(*(*bare.inputs, "")[:3], residual),
            )
            found[result.output] = _Sum(product, bare, rounding, (node, *last))
            break
    return found


def _hopper_takes(program: Program, node: Node, grid: Rounding) -> bool:
    """Tells whether the copy engine takes the sizes; it pads with 0, which has to stand for 0."""
    f, c, *taps = program.shape(node.inputs[1])
    window: dict[str, Any] = {
        name: node.attributes[name]
        for name in ("groups", "stride", "padding", "dilation")
        if name in node.attributes
    }
    pads = any(sides(window.get("padding", 0)))
    return is_aligned((*(taps or (1, 1)), c, f), DType.uint8, **window) and not (pads and grid.low)


def _grid(program: Program, value: str) -> Rounding | None:
    """Gives the levels to which a value is rounded, if 8 bits have as many; else nothing."""
    node = program.producers.get(value)
    if node is None or node.at_load:
        return None
    if node.op not in KEEPING:
        return rounding_of(node)
    grid = _grid(program, node.inputs[0])
    # No pool takes floats of 8 bits.
    return None if node.op == "max_pool2d" and isinstance(grid, Float8) else grid


def _keeps(program: Program, value: str) -> bool:
    """Tells whether a rounded value has the levels of what it is made of."""
    node = program.producers[value]
    return node.op in KEEPING or _grid(program, node.inputs[0]) == rounding_of(node)


def _rounded_filter(program: Program, value: str) -> list[Node]:
    """Finds how weights were rounded, each filter for itself, and scaled: the last node first.

    To scale them changes no integer. Gives nothing if they were not rounded.
    """
    found: list[Node] = []
    while node := program.producers.get(value):
        found.append(node)
        if node.op == "fake_quantize_filter":
            return found
        if node.op not in ("scale_filter", "reshape"):
            break
        value = node.inputs[0]
    return []


def _rounded_to(program: Program, weight: str) -> str:
    """Names the dtype to which weights are rounded; nothing if they are not."""
    found = _rounded_filter(program, weight)
    return str(found[-1].attributes.get("to", "int8")) if found else ""


def filter_steps(program: Program, constants: Mapping[str, Array], weight: str) -> Array | None:
    """Computes what an integer of each filter stands for, [F]; nothing if they are not rounded.

    Args:
        program: The program.
        constants: What it computes of weights.
        weight: Of a product.
    """
    if not (found := _rounded_filter(program, weight)):
        return None
    *scaled, rounding = found
    if len(rounding.inputs) == 1:
        return filter_scales(constants[weight], _rounded_to(program, weight))
    steps = constants[rounding.inputs[1]].astype(np.float64)
    for node in scaled:
        steps = steps * constants[node.inputs[1]] if node.op == "scale_filter" else steps
    return steps


def saturating(product: Node, grid: Rounding) -> str:
    """Gives a product's epilogue without an activation that only bounds what is stored.

    A grid ends where a rectified linear unit does: what is beyond saturates. Of integers Hopper's
    kernel has no activation before the zero point is added.
    """
    epilogue = str(product.attributes.get("epilogue", "none"))
    plain = "add" if epilogue.startswith("add") else "none"
    *bounds, name = epilogue.removeprefix("add_").split(" ")
    least, largest = grid.bounds
    if name == "relu":
        return plain if least >= 0 else epilogue
    if name == "clamp":
        low, high = map(float, bounds)
        step = (largest - least) / STEPS
        return plain if least >= low and largest <= high + step / 2 else epilogue
    return epilogue


def _stem(program: Program, value: str) -> Node | None:
    """Finds the stem of which a value is the rounded result, if it can store that itself."""
    rounding = program.producers[value]
    grid, node = Grid.read(rounding), program.producers.get(rounding.inputs[0])
    if grid is None or node is None or node.op not in STEMS:
        return None
    alone = program.only_user(node.output) is rounding
    return node if alone and not grid.low and saturating(node, grid) == "none" else None


class _Rewriting:
    """Rewrites a program.

    Args:
        program: The old one.
        products: What is to be of integers, by their outputs.
        sums: Those that products take in, by what they are rounded to.
        rounded: The levels of each rounded value that they read.
        on: The device.
    """

    def __init__(
        self,
        program: Program,
        products: Mapping[str, Node],
        sums: Mapping[str, _Sum],
        rounded: Mapping[str, Rounding],
        on: Backend,
    ) -> None:
        self.program = program
        self.products = products
        self.sums = sums
        self.rounded = rounded
        self.on = on
        self.taken = set(program.types)
        self.stored = {v: free(self.taken, f"{v}.{grid.stored}") for v, grid in rounded.items()}
        self.taken_in = {node.output for each in sums.values() for node in each.gone}
        """What products compute on the way to a sum."""
        self.storing = {value: made for value in rounded if (made := self.storing_product(value))}
        """The products that store their results rounded."""
        self.keeping = {value for value in rounded if _keeps(program, value)}
        """What has the levels of what it is made of."""
        self.pixels: dict[str, Node] = {}
        """What normalises the pixels that are rounded to values whose channels are no multiple."""
        if not on.is_gpu:
            for value in rounded:
                pixels = None if value in self.keeping else _pixels(program, value)
                if pixels and int(program.types[pixels.output].shape[-1]) % GROUP:
                    self.pixels[value] = pixels
        self.stems = {value: made for value in rounded if (made := _stem(program, value))}
        """The stems that store their results rounded."""
        for node in program.nodes:
            if node.output in self.keeping and node.op not in KEEPING:
                self.stored[node.output] = self.stored[node.inputs[0]]

    def done(self) -> Program:
        """Gives the new program."""
        rewrite = Rewrite(self.program)
        storing = {node.output for node in self.storing.values()}
        for value in self.rounded:
            node, product = self.program.producers[value], self.storing.get(value)
            if product:
                made = self.product(product, value)
            elif pixels := self.pixels.get(value):
                made = self.bytes_of(pixels, value)
                rewrite.replace([pixels])
            elif stem := self.stems.get(value):
                made = self.stem(stem, value)
                rewrite.replace([stem])
            elif value not in self.keeping:
                made = self.quantize(node)
            elif node.op in KEEPING:
                source, to = self.stored[node.inputs[0]], self.stored[value]
                made = [replace(node, inputs=(source,), outputs=(to,))]
            else:
                made = []
            if self.is_read_in_float(value, storing):
                made += self.dequantize(value)
            gone = self.sums[value].gone if value in self.sums else [product] if product else []
            rewrite.replace([*gone, node], *made)
        for output, node in self.products.items():
            if output not in storing:
                rewrite.replace([node], *self.product(node))
        return rewrite.done()

    def storing_product(self, value: str) -> Node | None:
        """Finds the product that may store a rounded value itself."""
        if value in self.sums:
            return self.sums[value].product
        node = self.program.producers[value]
        product = self.products.get(node.inputs[0])
        if product is None or self.program.only_user(product.output) is not node:
            return None
        grid = self.rounded[value]
        beside = [self.rounded.get(each) for each in (product.inputs[0], *product.inputs[3:])]
        return product if all(type(each) is type(grid) for each in beside) else None

    def is_read_in_float(self, value: str, storing: set[str]) -> bool:
        """Tells whether anything reads a rounded value in float32."""

        def reads(user: Node) -> bool:
            if user.output in self.taken_in:
                return False
            if user.output not in self.products:
                return user.output not in self.keeping
            return value in user.inputs[3:] and user.output not in storing

        outputs = self.program.outputs.values()
        return value in outputs or any(map(reads, self.program.users.get(value, ())))

    def product(self, node: Node, result: str = "") -> list[Node]:
        """Makes a product one of integers, that perhaps stores its result rounded: ``result``."""
        x, *rest = node.inputs
        grid = self.rounded[x]
        attributes: dict[str, Attribute] = {
            **{name: value for name, value in node.attributes.items() if name != "layout"},
            **grid._asdict(),
            "dtype": self.on.dtype,
        }
        outputs = node.outputs
        if result:
            grid = self.rounded[result]
            attributes |= {**_named("result", grid), "dtype": grid.stored}
            if "epilogue" in attributes:
                attributes["epilogue"] = saturating(node, grid)
            outputs = (self.stored[result],)
            if len(rest) > 2:
                grid = self.rounded[rest[2]]
                attributes |= _named("residual", grid)
                rest[2] = self.stored[rest[2]]
        steps, made = self.steps(node.inputs[1])
        if steps:
            rest = [*([*rest, "", ""][:3]), steps]
        if x in self.pixels:
            weight = free(self.taken, f"{rest[0]}.padded")
            more = -int(self.program.types[rest[0]].shape[1]) % GROUP
            pads: dict[str, Attribute] = {"pads": (0, 0, 0, more, 0, 0, 0, 0)}
            made.append(Node("pad", (rest[0],), (weight,), pads, at_load=True))
            rest[0] = weight
        new = replace(
            node,
            op=PRODUCTS[node.op],
            inputs=(self.stored[x], *rest),
            outputs=outputs,
            attributes=attributes,
        )
        return [*made, new]

    def steps(self, weight: str) -> tuple[str, list[Node]]:
        """Names what an integer of each filter stands for, and makes it.

        Where the program does not say it, it follows from the filter, and has no name.
        """
        *scaled, rounding = _rounded_filter(self.program, weight)
        steps, made = (*rounding.inputs, "")[1], list[Node]()
        for node in reversed(scaled):
            if steps and node.op == "scale_filter":
                name = free(self.taken, f"{weight}.steps")
                made.append(Node("mul", (steps, node.inputs[1]), (name,), at_load=True))
                steps = name
        return steps, made

    def bytes_of(self, pixels: Node, value: str) -> list[Node]:
        """Normalises pixels and stores them as uint8 at once, with channels of zeros behind."""
        grid, (x, mean, scale) = self.rounded[value], pixels.inputs
        names = [free(self.taken, f"{value}.{part}") for part in ("mean", "scale")]
        step: dict[str, Attribute] = {"step": grid.scale}
        low: dict[str, Attribute] = {"low": float(grid.low)}
        channels = int(self.program.types[pixels.output].shape[-1])
        room = channels + -channels % GROUP
        return [
            Node("bytes_mean", (mean, scale), (names[0],), step | low, at_load=True),
            Node("bytes_scale", (scale,), (names[1],), step, at_load=True),
            replace(
                pixels,
                inputs=(x, *names),
                outputs=(self.stored[value],),
                attributes={"dtype": "uint8", "channels": room},
            ),
        ]

    def stem(self, node: Node, value: str) -> list[Node]:
        """Makes a stem compute a rounded value's levels, by its weights, and store these."""
        *pixels, weight, bias = node.inputs
        inverse, scaled, shift = (
            free(self.taken, f"{value}.{part}") for part in ("inverse", "filter", "bias")
        )
        full: dict[str, Attribute] = {
            "shape": (int(self.program.types[weight].shape[0]),),
            "value": 1 / self.rounded[value].scale,
        }
        made = [
            Node("full", (), (inverse,), full, at_load=True),
            Node("scale_filter", (weight, inverse), (scaled,), at_load=True),
        ]
        if bias:
            made.append(Node("mul", (bias, inverse), (shift,), at_load=True))
        attributes = {**node.attributes, "dtype": "uint8"}
        if "epilogue" in attributes:
            attributes["epilogue"] = "none"
        new = replace(
            node,
            inputs=(*pixels, scaled, shift if bias else ""),
            outputs=(self.stored[value],),
            attributes=attributes,
        )
        return [*made, new]

    def quantize(self, node: Node) -> list[Node]:
        """Stores a value in 8 bits."""
        grid = self.rounded[node.output]
        expression, numbers = grid.storing
        to = self.stored[node.output]
        return self.pointwise(node.inputs[0], to, expression, numbers, grid.stored)

    def dequantize(self, value: str) -> list[Node]:
        """Gives what a stored value stands for."""
        expression, numbers = self.rounded[value].standing
        return self.pointwise(self.stored[value], value, expression, numbers, self.on.dtype)

    def pointwise(
        self, source: str, to: str, expression: str, numbers: Mapping[str, float], dtype: str
    ) -> list[Node]:
        """Computes an expression of a value and of numbers.

        These are constants, and no part of the expression, so that one kernel serves all values.
        """
        made = [
            Node(
                "full",
                (),
                (free(self.taken, f"{to}.{what}"),),
                {"shape": (1,), "value": number},
                at_load=True,
            )
            for what, number in numbers.items()
        ]
        attributes: dict[str, Attribute] = {"expression": expression, "dtype": dtype}
        inputs = (source, *(each.output for each in made))
        return [*made, Node("pointwise", inputs, (to,), attributes)]


def rounded(program: Program, on: Backend) -> Program:
    """Lets ops store 8 bits that give results of which nothing but these is read, on Hopper.

    The scale of a layer norm's result is part of its weight and bias.
    """
    if not on.is_hopper:
        return program
    rewrite, taken = Rewrite(program), set(program.types)
    for node in program.nodes:
        found = [each for value in node.outputs if (each := _stored(program, value))]
        if node.at_load or len(found) < len(node.outputs):
            continue
        roundings, grids = zip(*found, strict=True)
        if len({type(grid) for grid in grids}) > 1:
            continue
        attributes: dict[str, Attribute] = {**node.attributes, "dtype": grids[0].stored}
        inputs, made = node.inputs, list[Node]()
        if node.op == "layer_norm" and program.constants.issuperset(inputs[1:]):
            inputs, made = _scaled_norm(node, roundings[0], taken)
        elif node.op == "attention" and heads.stores_bytes(program, node, on):
            attributes |= _named("result", grids[0])
        elif node.op == "depthwise_qkv" and program.types[inputs[0]].dtype in HALVES:
            for part, grid in zip("qkv", grids, strict=True):
                attributes |= _named(part, grid)
        else:
            continue
        outputs = tuple(each.output for each in roundings)
        new = replace(node, inputs=inputs, outputs=outputs, attributes=attributes)
        rewrite.replace([node, *roundings], *made, new, place=node)
    return rewrite.done()


def _stored(program: Program, value: str) -> tuple[Node, Rounding] | None:
    """Finds what stores a value in 8 bits, and which, if nothing else reads it."""
    user = program.only_user(value)
    kind = STORED.get(program.types[user.output].dtype) if user else None
    if user is None or kind is None or user.op != "pointwise" or user.inputs[0] != value:
        return None
    numbers = [program.producers.get(each) for each in user.inputs[1:]]
    known = [float(n.attributes["value"]) for n in numbers if n and n.op == "full"]  # type: ignore[arg-type]
    if len(known) < len(numbers):
        return None
    grid = kind.stored_by(str(user.attributes["expression"]), known)
    return (user, grid) if grid else None


def _scaled_norm(norm: Node, rounding: Node, taken: set[str]) -> tuple[tuple[str, ...], list[Node]]:
    """Makes a layer norm give steps of what its result is stored as, by its weight and bias."""
    inverse, *zero = rounding.inputs[1:]
    x, weight, bias = norm.inputs
    names = [free(taken, f"{norm.name}.{part}.steps") for part in ("weight", "bias")]
    made = [
        Node("mul", (each, inverse), (name,), at_load=True)
        for each, name in zip((weight, bias), names, strict=True)
    ]
    if zero:
        names.append(free(taken, f"{norm.name}.bias.stored"))
        made.append(Node("add", (names[1], zero[0]), (names[2],), at_load=True))
    return (x, names[0], names[-1]), made


def _named(what: str, grid: Rounding) -> dict[str, Attribute]:
    """Names a grid's numbers as attributes of a product do."""
    return {f"{what}_{name}": number for name, number in grid._asdict().items()}
