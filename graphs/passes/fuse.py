"""Several ops become one, where a device has a kernel for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TypeGuard

from max.dtype import DType

from maxvision.graphs.arrange import (
    CHAINS,
    POOLED,
    PROJECTED,
    PROJECTED_DEPTH,
    ROW,
    SHORTCUT_CHAINS,
    STEM_CHAIN,
    WIDE_CHAINS,
    has_squeeze,
    has_stem,
    is_aligned,
    is_depthwise,
)
from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import ELEMENTWISE, JOINS, expression, joining
from maxvision.graphs.formats import BLOCK, packable
from maxvision.graphs.passes.norms import EPS, is_mlp
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.quantize import STORED, Grid
from maxvision.graphs.shapes import pair, sides
from maxvision.graphs.types import HALVES, product

PRODUCTS = ("conv2d", "linear", "token_linear", "matmul")
"""The ops that have an epilogue; their residual is the fourth input."""
ACTIVATED = (*PRODUCTS, "group_norm")
"""The ops whose epilogue may be an activation."""


def sparse(program: Program, on: Backend) -> Program:
    """Notes the format of each layer that runs sparse.

    Convolutions in groups do on Hopper: their filters are blocks of zeros but for the diagonal. So
    do windows of few filters, which are the M of a product there: DenseNet-121's, of 32, take two
    thirds of the time at batch 128 that they take as its N, and 1 us more at batch 1 (an H200).
    """
    rewrite = Rewrite(program)
    for node in program.nodes:
        format = next((on.formats[layer] for layer in node.layers if layer in on.formats), "")
        if not format and _in_blocks(program, node, on):
            format = "blocks"
        if format and node.op in ("conv2d", "linear"):
            rewrite.replace([node], node.with_attributes(format=format))
    return rewrite.done()


def _in_blocks(program: Program, node: Node, on: Backend) -> bool:
    """Tells whether a convolution in groups, or of few filters, is one of blocks on Hopper."""
    groups = node.attributes.get("groups", 1)
    if node.op != "conv2d" or node.inputs[1] not in program.constants:
        return False
    dtype = node.dtype or on.dtype
    if not isinstance(groups, int) or dtype == "float32" or not on.is_hopper:
        return False
    f, c, r, s = program.shape(node.inputs[1])
    if groups == 1:
        return r * s > 1 and c % BLOCK == 0 and f <= BLOCK // 2 and packable(c, f)
    return not is_depthwise((r, s, c, f), groups) and packable(c * groups, f)


def tokens(program: Program, _: Backend) -> Program:
    """Puts a class token before the others in one copy, and norms the first token in its place."""
    rewrite = Rewrite(program)
    for node in program.nodes:
        if _is(node, "concat", axis=1) and len(node.inputs) == 2:
            expand = program.producers.get(node.inputs[0])
            if _is(expand, "expand") and expand.inputs[0] in program.constants:
                token = expand.inputs[0]
                size = program.types[expand.output].shape
                if len(size) == 3 and program.shape(token) == (1, 1, size[2]) and size[1] == 1:
                    gone = [expand] if program.only_user(expand.output) is node else []
                    new = Node("class_token", (node.inputs[1], token), node.outputs)
                    rewrite.replace([*gone, node], new)
        elif node.op == "layer_norm" and (found := _first_token(program, node)):
            taken, *others = found
            inputs = (taken.inputs[0], *node.inputs[1:])
            new = replace(node, op="layernorm_first", inputs=inputs, outputs=others[-1].outputs)
            rewrite.replace(found, new)
    return rewrite.done()


def _first_token(program: Program, norm: Node) -> list[Node] | None:
    """Finds what norms the first token [N, C] of tokens [N, T, C]: slice, reshape and the norm.

    The reshape may come last.
    """
    before = program.producers.get(norm.inputs[0])
    after = program.only_user(norm.output)
    if _is(before, "reshape"):
        reshape, chain = before, [program.producers.get(before.inputs[0]), before, norm]
    elif _is(after, "reshape"):
        reshape, chain = after, [before, norm, after]
    else:
        return None
    found = [each for each in chain if each is not None]
    if len(found) < 3 or not _is(found[0], "slice", axis=1, start=0, stop=1):
        return None
    if any(program.only_user(a.output) is not b for a, b in pairwise(found)):
        return None
    one, flat = (program.types[each.output].shape for each in (found[0], reshape))
    return found if len(one) == 3 and flat == (one[0], one[2]) else None


def epilogues(program: Program, _: Backend) -> Program:
    """Gives a product, or a group norm, what follows it: + residual, then an op of one value.

    Or what it is multiplied by, as gates are: another value, or an op of one. What a product is
    joined to may be of another shape, if the product is reshaped for it: then that is reshaped.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    rounded = any(node.op == "fake_quantize" for node in program.nodes)
    for op in ("add",) if rounded else JOINS:  # what 8-bit products give is not multiplied
        for node in program.nodes:
            if node.op == op and len(node.inputs) == 2 and not rewrite.has(node):
                _join(program, rewrite, node, taken)
    for node in program.nodes:
        if is_activation(node) and not rewrite.has(node):
            product = program.producers.get(node.inputs[0])
            bare = product and _is_bare(program, product, node, ACTIVATED)
            if product and bare and not rewrite.has(product):
                fused = product.with_attributes(epilogue=activation(node))
                rewrite.replace([product, node], replace(fused, outputs=node.outputs))
    return rewrite.done()


def _join(program: Program, rewrite: Rewrite, node: Node, taken: set[str]) -> None:
    """Joins one side of a sum or a product to the other, if that is a product of matrices."""
    for value, other in (node.inputs, node.inputs[::-1]):
        user, product = node, program.producers.get(value)
        if _is(product, "reshape") and program.only_user(value) is node:
            user, product = product, program.producers.get(product.inputs[0])
        if (
            product is None
            or value == other
            or rewrite.has(product)
            or not _is_bare(program, product, user)
            or program.types[other] != program.types[value]
            or other in program.constants
        ):
            continue
        residual, last, gone = other, list[Node](), list[Node]()
        if node.op == "add":
            following = program.only_user(node.output)
            last = [following] if following and is_activation(following) else []
        else:
            before = program.producers.get(other)
            if (
                before
                and is_activation(before)
                and program.only_user(other) is node
                and not rewrite.has(before)
                and program.types[before.inputs[0]] == program.types[other]
            ):
                residual, gone = before.inputs[0], [before]
        inputs = (*product.inputs, "", "")[:3]
        ends = "_".join([node.op, *map(activation, last or gone)])
        fused = product.with_attributes(epilogue=ends)
        outputs = (last or [node])[0].outputs
        if user is node:
            new = [replace(fused, inputs=(*inputs, residual), outputs=outputs)]
        else:
            held, made = (free(taken, f"{name}.reshape") for name in (residual, outputs[0]))
            shapes = (program.types[each.output].shape for each in (product, node))
            as_product, as_node = ({"shape": shape} for shape in shapes)
            new = [
                Node("reshape", (residual,), (held,), as_product),
                replace(fused, inputs=(*inputs, held), outputs=(made,)),
                Node("reshape", (made,), outputs, as_node),
            ]
        between = [user] if user is not node else []
        rewrite.replace([product, *between, *gone, node, *last], *new)
        return


def is_activation(node: Node) -> bool:
    """Tells whether a node is an elementwise op of one value: what an epilogue may end with."""
    if node.op not in ELEMENTWISE or node.op == "fake_quantize" or node.at_load:
        return False
    return ELEMENTWISE[node.op].values == 1


def activation(node: Node) -> str:
    """Writes down an op of one value as an epilogue."""
    return expression(node.op, node.attributes).removeprefix("x0 ")


def _is_bare(program: Program, product: Node, user: Node, ops: tuple[str, ...] = PRODUCTS) -> bool:
    """Tells whether a product has no epilogue yet, and its result goes to ``user`` alone."""
    return (
        product.op in ops
        and not product.at_load
        and product.attributes.get("epilogue", "none") == "none"
        and program.only_user(product.output) is user
    )


def squeeze_excite(program: Program, on: Backend) -> Program:
    """Scales the channels of images by gates that two products of their mean give, in one op.

    With what follows: + residual, and an op of one value. On a CPU, and on Hopper in 16 bits
    (ops/squeeze_excite).
    """
    if on.is_gpu and not (on.is_hopper and on.dtype in HALVES):
        return program
    rewrite = Rewrite(program)
    for node in program.nodes:
        if node.op != "mul" or len(node.inputs) != 2 or rewrite.has(node):
            continue
        for x, gate in (node.inputs, node.inputs[::-1]):
            if found := _excitation(program, x, gate, node, on):
                gone, squeeze, excite = found
                residual, epilogue, ends = _ending(program, node)
                attributes: dict[str, Attribute] = {
                    "activation": squeeze.attributes.get("epilogue", "none"),
                    "gate": excite.attributes.get("epilogue", "none"),
                    "epilogue": epilogue,
                }
                gone += ends
                if not all(program.types[each.output].dtype == on.dtype for each in gone):
                    continue
                weights = (*(*squeeze.inputs, "")[1:3], *(*excite.inputs, "")[1:3])
                new = Node(
                    "squeeze_excite",
                    (x, *weights, *([residual] if residual else [])),
                    gone[-1].outputs,
                    attributes,
                    tuple(layer for each in gone for layer in each.layers),
                )
                rewrite.replace(gone, new)
                break
    return rewrite.done()


def _excitation(
    program: Program, x: str, gate: str, times: Node, on: Backend
) -> tuple[list[Node], Node, Node] | None:
    """Finds what makes a gate [N, 1, 1, C] of images x[N, H, W, C], for ``times`` alone.

    Gives all that goes, then the two products.
    """
    shape = program.types[x].shape
    if len(shape) != 4 or program.types[gate].shape != (shape[0], 1, 1, shape[3]):
        return None
    gone, found, value = [times], list[Node](), gate
    while len(found) < 3:
        node = program.producers.get(value)
        if node is None or node.at_load or program.only_user(value) is not gone[0]:
            return None
        if node.op != "reshape":
            found.append(node)
        elif program.types[value].shape[0] != shape[0]:
            return None
        gone.insert(0, node)
        value = node.inputs[0]
    excite, squeeze, mean = found
    if value != x or not _is_mean(program, mean):
        return None
    if not all(_is_small_product(program, each) for each in (squeeze, excite)):
        return None
    k, c = program.shape(squeeze.inputs[1])[:2]
    fits = c == shape[3] and program.shape(excite.inputs[1])[:2] == (c, k)
    return (gone, squeeze, excite) if fits and has_squeeze(c, k, not on.is_gpu) else None


def _is_mean(program: Program, node: Node) -> bool:
    """Tells whether a node averages images [N, H, W, C]."""
    if node.op == "mean":
        axes = node.attributes["axes"]
        return isinstance(axes, tuple) and sorted(map(str, axes)) == ["1", "2"]
    if not _is(node, "avg_pool2d", layout="NHWC"):
        return False
    kernel, padding = node.attributes.get("kernel"), _setting(node, "padding")
    size = program.shape(node.inputs[0])[:2]
    return kernel is None or (pair(kernel) == size and padding == (0, 0))


def _is_small_product(program: Program, node: Node) -> bool:
    """Tells whether a node multiplies by weights alone: a linear layer, or a 1 x 1 convolution."""
    if not _are_constants(program, node.inputs[1:]):
        return False
    if node.op == "linear":
        return not node.attributes.get("format")
    plain = _is_plain_conv(program, node, stride=(1, 1), padding=(0, 0))
    return plain and program.shape(node.inputs[1])[2:] == (1, 1)


def _ending(program: Program, node: Node) -> tuple[str, str, list[Node]]:
    """Finds what may be an epilogue behind a node: the residual, its name, and the nodes."""
    residual, ends, words = "", [], []
    after = program.only_user(node.output)
    if after and after.op == "add" and len(after.inputs) == 2:
        others = [value for value in after.inputs if value != node.output]
        alike = others and program.types[others[0]] == program.types[node.output]
        if alike and others[0] not in program.constants:
            residual, words = others[0], ["add"]
            ends.append(after)
            after = program.only_user(after.output)
    if after and is_activation(after):
        words.append(activation(after))
        ends.append(after)
    return residual, "_".join(words) or "none", ends


def stem(program: Program, on: Backend) -> Program:
    """Makes the first layer of pixels in one go: normalise, convolve, then relu and pool, or norm.

    Without these, with the convolution's activation. On an NVIDIA GPU, in 16 bits (ops/stem).
    """
    if on.api != "cuda" or on.dtype not in HALVES:
        return program
    rewrite = Rewrite(program)
    for conv in program.nodes:
        epilogue = str(conv.attributes.get("epilogue", "none"))
        if not _is_plain_conv(program, conv) or joining(epilogue):
            continue
        f, c, r, s = program.shape(conv.inputs[1])
        stride, padding = _setting(conv, "stride"), _setting(conv, "padding")
        square = stride[0] == stride[1] and padding[0] == padding[1]
        if not square or not has_stem((r, s, c, f), stride[0], alone=True):
            continue
        op, gone, last = "", [conv], program.only_user(conv.output)
        if last and has_stem((r, s, c, f), stride[0]) and (op := _stem_with(conv, last)):
            gone = [conv, last]
        before = program.producers.get(conv.inputs[0])
        pixels, levels = conv.inputs[0], ("", "")
        if before and before.op in ("normalize", "cast"):
            if program.only_user(before.output) is not conv:
                continue
            pixels, mean, scale = (*before.inputs, "", "")[:3]
            levels, gone = (mean, scale), [before, *gone]
        in_levels = program.types[pixels].dtype == "uint8"
        if pixels not in program.inputs or in_levels != bool(levels[0]):
            continue
        if program.types[gone[-1].output].dtype != on.dtype:
            continue
        attributes: dict[str, Attribute] = {
            "stride": stride[0],
            "padding": padding[0],
            "dtype": on.dtype,
        }
        if op == "stem_layernorm":
            attributes["eps"] = gone[-1].attributes.get("eps", EPS)
        if not op:
            op, attributes["epilogue"] = "stem_conv2d", epilogue
        norm = gone[-1].inputs[1:] if op == "stem_layernorm" else ()
        new = Node(
            op,
            (pixels, *levels, *(*conv.inputs, "")[1:3], *norm),
            gone[-1].outputs,
            attributes,
            tuple(layer for node in gone for layer in node.layers),
        )
        rewrite.replace(gone, new)
    return rewrite.done()


def _stem_with(conv: Node, last: Node) -> str:
    """Names the op of a first convolution with the pool or norm after it, if there is one."""
    epilogue = conv.attributes.get("epilogue", "none")
    if _is(last, "layer_norm") and epilogue == "none":
        return "stem_layernorm"
    if not _is(last, "max_pool2d", layout="NHWC") or epilogue != "relu":
        return ""
    window = [_setting(last, name) for name in ("kernel", "stride", "padding", "dilation")]
    usual = window == [(3, 3), (2, 2), (1, 1), (1, 1)] and not last.attributes.get("ceil_mode")
    return "stem_maxpool" if usual else ""


def patches(program: Program, on: Backend) -> Program:
    """Convolves patches that touch each other by their rows, as windows of one column.

    An image [N, H, W, C] of patches of R x S pixels is one [N P, R, Q, S C] without a copy. It is
    read so on a GPU where that has fewer steps of 128 bytes of channels, or channels that the copy
    engine takes: three colours by 16 columns are 48 channels. One patch that is the whole image is
    a pixel of R S C channels: Hopper's tiles are of pixels of an image, and would have one each.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    for conv in program.nodes if on.is_gpu else ():
        if not _is_plain_conv(program, conv, padding=(0, 0)) or len(conv.inputs) > 3:  # a residual
            continue
        x, filters, *bias = conv.inputs
        f, c, r, s = program.shape(filters)
        n, h, w, _ = program.types[x].shape
        whole = (h, w) == (r, s)
        if (r, s) == (1, 1) or not (whole or _setting(conv, "stride") == (r, s)):
            continue
        width = ROW // DType[conv.dtype or on.dtype].size_in_bytes
        if not isinstance(h, int) or not isinstance(w, int) or h % r or w % s:
            continue
        if not whole and s * -(-c // width) <= -(-s * c // width) and c % 8 == 0:
            continue
        high, wide = (1, r * s) if whole else (r, s)  # of a patch, as it is read
        turned, rows, image, result = (
            free(taken, f"{conv.name}.{part}") for part in ("turned", "rows", "patches", "result")
        )
        order = (0, 2, 3, 1) if whole else (0, 3, 1, 2)
        window = {"layout": "NHWC", "epilogue": conv.attributes.get("epilogue", "none")}
        seen = (product([n, h // r]), high, w // s, wide * c)
        rewrite.replace(
            [conv],
            Node("permute", (filters,), (turned,), {"axes": order}, at_load=True),
            Node("reshape", (turned,), (rows,), {"shape": (f, wide * c, high, 1)}, at_load=True),
            Node("reshape", (x,), (image,), {"shape": seen}),
            replace(conv, inputs=(image, rows, *bias), outputs=(result,), attributes=window),
            Node("reshape", (result,), conv.outputs, {"shape": (n, h // r, w // s, f)}),
        )
    return rewrite.done()


def shortcut(program: Program, on: Backend) -> Program:
    """Sums a block's last convolution and its shortcut's in one op, which stores no shortcut.

    Also in 8 bits on a GPU, where the shortcut's result is then not rounded any more.
    """
    rewrite = Rewrite(program)
    for conv in program.nodes:
        eight_bit, end = conv.op == "quantized_conv2d", _rectifying(program, conv)
        if not _is_plain_conv(program, conv, epilogue=_added(end), stride=(1, 1)):
            continue
        other = program.producers.get(conv.inputs[3])
        if (
            other is None
            or other.op != conv.op
            or not _is_plain_conv(program, other, epilogue="none", padding=(0, 0))
            or program.shape(other.inputs[1])[2:] != (1, 1)
            or program.only_user(other.output) is not conv
            or conv.inputs[0] == other.output
            or (eight_bit and not (on.is_gpu and _stores_bytes(conv) and _stores_bytes(other)))
        ):
            continue
        inputs = [*conv.inputs[:3], *(*other.inputs, "")[:3]]
        attributes: dict[str, Attribute] = {
            "padding": conv.attributes.get("padding", 0),
            "stride": other.attributes.get("stride", 1),
        }
        if eight_bit:
            inputs += [(*node.inputs, "", "", "")[4] for node in (conv, other)]
            attributes["epilogue"] = end
            for name in (each for each in Grid._fields if each in conv.attributes):
                attributes[name] = conv.attributes[name]
                attributes[f"source_{name}"] = other.attributes[name]
                attributes[f"result_{name}"] = conv.attributes[f"result_{name}"]
        layers = *conv.layers, *other.layers
        new = Node(f"{conv.op}_shortcut", tuple(inputs), conv.outputs, attributes, layers)
        rewrite.replace([other, conv], new)
    return rewrite.done()


def _stores_bytes(node: Node) -> bool:
    """Tells whether a product of 8-bit numbers stores such, too."""
    return node.attributes.get("dtype") in STORED


def _rectifying(program: Program, node: Node) -> str:
    """Names the epilogue that rectifies a result: none if that is of integers, which saturate."""
    return "none" if STORED.get(program.types[node.output].dtype) is Grid else "relu"


def _added(epilogue: str) -> str:
    """Names the same epilogue behind a sum."""
    return "add" if epilogue == "none" else f"add_{epilogue}"


def chain(program: Program, on: Backend) -> Program:
    """Computes a block's last 1 x 1 and the next one's first in one op, on a GPU.

    The last may have a residual or its shortcut's convolution.
    """
    rewrite = Rewrite(program)
    for conv in program.nodes if on.is_gpu else ():
        eight_bit, shortcut = conv.op.startswith("quantized"), conv.op.endswith("conv2d_shortcut")
        end, own = _rectifying(program, conv), 6 if shortcut else 4
        if shortcut:
            begins = _is_flat(program, conv) and conv.attributes.get("epilogue", end) == end
        else:
            begins = _is_pointwise(program, conv, _added(end))
            begins = begins and (not eight_bit or _stores_bytes(conv))
        if not begins:
            continue
        known = *CHAINS, *SHORTCUT_CHAINS, *(() if eight_bit else WIDE_CHAINS)
        widths = [program.shape(conv.inputs[i])[1] for i in range(1, own, 3)]
        for following in program.users.get(conv.output, ()):
            if (
                following.op == ("quantized_conv2d" if eight_bit else "conv2d")
                and _is_pointwise(program, following, end)
                and following.inputs[0] == conv.output
                and (*widths, program.shape(following.inputs[1])[0]) in known
                and (not eight_bit or _stores_bytes(following))
                and not rewrite.has(conv, following)
            ):
                inputs = [*conv.inputs[:own], *(*following.inputs, "")[1:3]]
                attributes: dict[str, Attribute] = {}
                if eight_bit:
                    steps = slice(own, own + len(widths))
                    inputs += [
                        *(*conv.inputs, "", "", "")[steps],
                        (*following.inputs, "", "", "")[4],
                    ]
                    for name in (each for each in Grid._fields if each in conv.attributes):
                        kinds = [k for k in conv.attributes if k.rpartition("_")[2] == name]
                        attributes |= {kind: conv.attributes[kind] for kind in kinds}
                        attributes[f"next_{name}"] = following.attributes[f"result_{name}"]
                layers = *conv.layers, *following.layers
                outputs = conv.output, following.output
                new = Node(f"{conv.op}_chain", tuple(inputs), outputs, attributes, layers)
                rewrite.replace([conv, following], new, place=conv)
                break
    return rewrite.done()


def stem_chain(program: Program, on: Backend) -> Program:
    """Computes a ResNet's stem and the first block's first 1 x 1 in one op: Hopper, 16 bits."""
    if not on.is_hopper or on.dtype not in HALVES:
        return program
    rewrite = Rewrite(program)
    for node in program.nodes:
        if node.op != "stem_maxpool" or node.attributes["dtype"] != on.dtype:
            continue
        x, filter = program.types[node.inputs[0]], program.shape(node.inputs[3])
        window = tuple(node.attributes[name] for name in ("stride", "padding"))
        if x.dtype != "uint8" or (x.shape[2], filter, window) != STEM_CHAIN:
            continue
        for following in program.users.get(node.output, ()):
            if (
                following.op == "conv2d"
                and following.inputs[0] == node.output
                and _is_pointwise(program, following, "relu")
                and program.shape(following.inputs[1])[0] == filter[0]
                and program.types[following.output].dtype == on.dtype
            ):
                new = replace(
                    node,
                    op="stem_maxpool_conv2d",
                    inputs=(*node.inputs, *(*following.inputs, "")[1:3]),
                    outputs=(node.output, following.output),
                    layers=(*node.layers, *following.layers),
                )
                rewrite.replace([node, following], new, place=node)
                break
    return rewrite.done()


def _is_flat(program: Program, node: Node) -> bool:
    """Tells whether a shortcut's sum is of two convolutions of single pixels, all of them."""
    return (
        program.shape(node.inputs[1])[2:] == (1, 1)
        and _setting(node, "padding") == (0, 0)
        and _setting(node, "stride") == (1, 1)
    )


def _is_pointwise(program: Program, node: Node, epilogue: str) -> bool:
    plain = _is_plain_conv(program, node, epilogue=epilogue, stride=(1, 1), padding=(0, 0))
    return plain and program.shape(node.inputs[1])[2:] == (1, 1)


def _is_plain_conv(
    program: Program, node: Node, epilogue: str = "", **window: tuple[int, int]
) -> bool:
    """Tells whether a convolution is dense, of one group and no dilation, and as asked for."""
    given = node.attributes
    return (
        (node.op == "quantized_conv2d" or (node.op == "conv2d" and given.get("layout") == "NHWC"))
        and node.inputs[1] in program.constants
        and not given.get("format")
        and given.get("groups", 1) == 1
        and _is_padded_evenly(node)
        and _setting(node, "dilation") == (1, 1)
        and (not epilogue or given.get("epilogue", "none") == epilogue)
        and all(_setting(node, name) == value for name, value in window.items())
    )


def _is_padded_evenly(node: Node) -> bool:
    """Tells whether a convolution has as many zeros below and right as above and left."""
    zeros = sides(node.attributes.get("padding", 0))
    return zeros[:2] == zeros[2:]


def _setting(node: Node, name: str) -> tuple[int, int]:
    """Gives a window's size, stride, padding or dilation; one that is not said is 0 or 1."""
    return pair(node.attributes.get(name, 0 if name == "padding" else 1))


def qkv(program: Program, on: Backend) -> Program:
    """Multiplies query, key and value tokens by their weights in one op; in 8 bits on Hopper."""
    rewrite = Rewrite(program)
    for node in program.nodes:
        if node.op != "attention":
            continue
        found = [program.producers.get(value) for value in node.inputs[:3]]
        linears = [
            each
            for each in found
            if (_is_dense_linear(each, program, "none") or _is_linear_in_bytes(each, on))
            and program.only_user(each.output) is node
        ]
        if len(linears) < 3 or len({each.output for each in linears}) < 3:
            continue
        given = [program.types[each.inputs[0]] for each in linears]
        shapes = {program.types[each.inputs[1]].shape for each in linears}
        if len(shapes) > 1 or given[1] != given[2] or any(len(x.shape) != 3 for x in given):
            continue
        if len({(each.op, program.types[each.inputs[0]].dtype) for each in linears}) > 1:
            continue
        inputs = [each.inputs[0] for each in linears]
        for each in linears:
            inputs += (*each.inputs, "")[1:3]
        op, attributes = "qkv_linear", dict[str, Attribute]()
        if linears[0].op == "quantized_linear":
            op = f"quantized_{op}"
            inputs += [(*each.inputs, "", "", "")[4] for each in linears]
            attributes["dtype"] = linears[0].attributes["dtype"]
            for part, each in zip(("q_", "k_", "v_"), linears, strict=True):
                named = (name for name in Grid._fields if name in each.attributes)
                attributes |= {f"{part}{name}": each.attributes[name] for name in named}
        new = Node(
            op,
            tuple(inputs),
            tuple(each.output for each in linears),
            attributes,
            tuple(dict.fromkeys(layer for each in linears for layer in each.layers)),
        )
        order = {n.output: i for i, n in enumerate(program.nodes)}
        rewrite.replace(linears, new, place=max(linears, key=lambda each: order[each.output]))
    return rewrite.done()


def depthwise(program: Program, on: Backend) -> Program:
    """Norms tokens and convolves them, channel by channel, into query, key and value in one op.

    The class token, if there is one, is normed and passes by the convolutions. For odd windows of
    up to 5, on a CPU, and on an NVIDIA GPU if C is a multiple of 16 bytes.
    """
    rewrite = Rewrite(program)
    for norm in program.nodes:
        if norm.op != "layer_norm" or len(program.types[norm.inputs[0]].shape) != 3:
            continue
        if found := _projections(program, norm, on):
            rewrite.replace([norm, *found[0]], found[1], place=norm)
    return rewrite.done()


def _projections(program: Program, norm: Node, on: Backend) -> tuple[list[Node], Node] | None:
    t, c = program.shape(norm.output)
    bytes = DType[norm.dtype or on.dtype].size_in_bytes
    if on.is_gpu and (on.api != "cuda" or c * bytes % 16 or c > 128 * 16 // bytes):
        return None
    users = list(program.users.get(norm.output, ()))
    first = [each for each in users if _is(each, "slice", axis=1, start=0, stop=1)]
    rest = [each for each in users if _is(each, "slice", axis=1, start=1, stop=t)]
    image = program.only_user(rest[0].output if rest else norm.output)
    if (first or rest) and (len(first), len(rest), len(users)) != (1, 1, 2):
        return None
    if not _is(image, "reshape") or len(program.types[image.output].shape) != 4:
        return None
    n, h, w, channels = program.types[image.output].shape
    gone, outputs, convs = [*first, *rest, image], [], program.users.get(image.output, ())
    hidden = {norm.output, image.output, *(each.output for each in first)}
    if [each.op for each in convs] != ["conv2d"] * 3:
        return None
    if not hidden.isdisjoint(program.outputs.values()):
        return None
    if (n, channels) != (program.types[norm.output].shape[0], c):
        return None
    if first and len(program.users.get(first[0].output, ())) != 3:
        return None  # the class token goes elsewhere too
    for conv in convs:
        reshape = program.only_user(conv.output)
        if not _is(reshape, "reshape"):
            return None
        p, q = program.types[conv.output].shape[1:3]
        if program.types[reshape.output].shape != (n, p * q, c):  # type: ignore[operator]
            return None
        last = reshape
        if first:
            concat = program.only_user(reshape.output)
            if not _is(concat, "concat", axis=1, inputs=(first[0].output, reshape.output)):
                return None
            last = concat
        gone += [conv, reshape] + ([last] if first else [])
        outputs.append(last.output)
    order = _order(program, outputs)
    outputs, convs = [outputs[i] for i in order], tuple(convs[i] for i in order)
    query, key, value = convs
    kernel = program.shape(query.inputs[1])[2]
    windows = [[_setting(each, part) for part in ("stride", "padding")] for each in convs]
    (stride, across), (padding, beside) = windows[1]
    if (
        kernel not in (1, 3, 5)
        or any(not _is_depthwise(program, each, c, kernel) for each in convs)
        or windows[0] != [(1, 1), (kernel // 2, kernel // 2)]
        or windows[1] != windows[2]
        or (stride, padding) != (across, beside)
        or 2 * padding >= kernel
    ):
        return None
    filters = [name for each in (query, key, value) for name in (*each.inputs, "")[1:3]]
    if not _are_constants(program, (*norm.inputs[1:], *filters)):
        return None  # kernels load them before the one ahead is done
    new = Node(
        "depthwise_qkv",
        (*norm.inputs, *filters),
        tuple(outputs),
        {
            "size": (h, w),
            "kernel": kernel,
            "padding_q": kernel // 2,
            "padding_kv": padding,
            "stride_kv": stride,
            "class_token": bool(first),
            "eps": norm.attributes.get("eps", EPS),
        },
        (*norm.layers, *(layer for each in convs for layer in each.layers)),
    )
    return gone, new


def _order(program: Program, values: list[str]) -> list[int]:
    """Gives the places of query, key and value among values, which their linear layers tell."""
    user = program.only_user(values[0])
    if _is(user, "qkv_linear") and set(user.inputs[:3]) == set(values):
        return [values.index(value) for value in user.inputs[:3]]
    return [0, 1, 2]


def _are_constants(program: Program, values: Iterable[str]) -> bool:
    return all(value in program.constants for value in values if value)


def _is_depthwise(program: Program, node: Node, c: int, kernel: int) -> bool:
    given = node.attributes
    return (
        _is(node, "conv2d", layout="NHWC", groups=c)
        and program.shape(node.inputs[1]) == (c, 1, kernel, kernel)
        and given.get("epilogue", "none") == "none"
        and _is_padded_evenly(node)
        and _setting(node, "dilation") == (1, 1)
        and not given.get("format")
    )


def mlp(program: Program, on: Backend) -> Program:
    """Sends normalised tokens through an MLP in one op, which stores no hidden layer.

    For the widths of ops/gemm/chain.mojo; ``norms`` has made the norm part of the first product.
    """
    rewrite = Rewrite(program)
    for first in program.nodes:
        if first.op == "normed_linear" and is_mlp(program, first, first.inputs[0], on):
            second = program.only_user(first.output)
            assert second is not None
            new = Node(
                "layernorm_mlp",
                (*first.inputs, *second.inputs[1:3]),
                second.outputs,
                {"eps": first.attributes["eps"]},
                (*first.layers, *second.layers),
            )
            rewrite.replace([first, second], new)
    return rewrite.done()


def projection(program: Program, on: Backend) -> Program:
    """Attends and multiplies by the linear layer behind in one op, which stores nothing between.

    For the sizes of ops/attention/linear.mojo; ``norms`` has made that layer measure its result.
    """
    rewrite = Rewrite(program)
    for last in program.nodes:
        if last.op != "linear_moments":
            continue
        attention = program.producers.get(last.inputs[0])
        if attention is not None and _is_projected(program, attention, last):
            rewrite.replace(
                [attention, last],
                Node(
                    "attention_linear",
                    (*attention.inputs, *last.inputs[1:]),
                    last.outputs,
                    {name: attention.attributes[name] for name in ("heads", "scale")},
                    (*attention.layers, *last.layers),
                    last.origin,
                ),
            )
    return rewrite.done()


def _is_projected(program: Program, attention: Node, last: Node) -> bool:
    """Tells whether ``attention_linear`` computes an attention and the layer behind it."""
    if not _is(attention, "attention") or any(attention.inputs[3:]) or attention.dtype:
        return False
    (_, c), (keys, _) = program.shape(attention.outputs[0]), program.shape(attention.inputs[1])
    return (
        not any(map(attention.attributes.get, ("causal", "logsumexp", "dtype")))
        and program.only_user(attention.output) is last
        and program.shape(last.inputs[1]) == (c, c)
        and attention.attributes["heads"] == c // PROJECTED_DEPTH
        and keys <= PROJECTED.get(c, 0)
    )


def means(program: Program, on: Backend) -> Program:
    """Averages small images in the op of the 1 x 1 convolution that makes them, on Hopper.

    In 16 bits. Of one image it is one launch (ops/conv2d/mean.mojo), of several two, as before.
    """
    rewrite = Rewrite(program)
    for conv in program.nodes if on.is_hopper else ():
        mean = program.only_user(conv.output) if conv.op == "conv2d" else None
        if mean and _is_mean(program, mean) and _is_averaged(program, conv, mean, on):
            new = Node(
                "conv2d_mean",
                conv.inputs,
                mean.outputs,
                {
                    "epilogue": conv.attributes.get("epilogue", "none"),
                    "keepdim": len(program.types[mean.output].shape) == 4,
                },
                conv.layers,
                conv.origin,
            )
            rewrite.replace([conv, mean], new)
    return rewrite.done()


def _is_averaged(program: Program, conv: Node, mean: Node, on: Backend) -> bool:
    """Tells whether ``conv2d_mean`` computes a convolution and the mean behind it."""
    if not _is_pointwise(program, conv, "") or conv.dtype or mean.attributes.get("expression"):
        return False
    f, c, _, _ = program.shape(conv.inputs[1])
    kinds = {program.types[each].dtype for each in (conv.inputs[0], conv.output, mean.output)}
    pixels = product(program.types[conv.output].shape[1:3])
    return (
        on.dtype in HALVES
        and kinds == {on.dtype}
        and is_aligned((1, 1, c, f), DType[on.dtype])
        and isinstance(pixels, int)
        and pixels <= POOLED
    )


def _is_linear_in_bytes(node: Node | None, on: Backend) -> TypeGuard[Node]:
    """Tells whether a node is a linear layer of 8-bit tokens on Hopper, with no activation."""
    return (
        on.is_hopper
        and _is(node, "quantized_linear")
        and not node.inputs[3:4]
        and node.attributes.get("epilogue", "none") == "none"
        and not _stores_bytes(node)
    )


def _is_dense_linear(node: Node | None, program: Program, epilogue: str) -> TypeGuard[Node]:
    return (
        _is(node, "linear")
        and node.inputs[1] in program.constants
        and not node.attributes.get("format")
        and node.attributes.get("epilogue", "none") == epilogue
    )


def _is(
    node: Node | None, op: str, inputs: Iterable[str] = (), **attributes: object
) -> TypeGuard[Node]:
    """Tells whether there is a node of an op, perhaps with these inputs and attributes."""
    return (
        node is not None
        and node.op == op
        and (not inputs or node.inputs == tuple(inputs))
        and all(node.attributes.get(name) == value for name, value in attributes.items())
    )
