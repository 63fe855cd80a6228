"""Small networks for tests: those of papers in miniature, and random ones that no paper has."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from maxvision.common.errors import UserError
from maxvision.graphs.cvt import CvtSpec, CvtStage, cvt
from maxvision.graphs.efficientnet import EfficientNetSpec, Stage, efficientnet
from maxvision.graphs.net import Net, Value
from maxvision.graphs.program import Program
from maxvision.graphs.resnet import ResNetSpec, resnet
from maxvision.graphs.types import BATCH


def program(write: Callable[[Net, Value], Any], *shape: int) -> Program:
    """Writes a network of an input x[N, ...] down; what it returns is its output."""
    net = Net("net")
    y = write(net, net.input("x", (BATCH, *shape)))
    if y is not None:
        net.output("y", y)
    return net.program()


def pre_activation(net: Net, x: Value) -> Value:
    """Adds blocks of batch norm, relu, convolution (He et al. 2016, arXiv:1603.05027)."""
    for i in range(2):
        with net.at(i):
            y = net.relu(net.batch_norm(x, "norm1"))
            y = net.conv2d(y, "conv1", 6, 3, padding=1, bias=False)
            y = net.relu(net.batch_norm(y, "norm2"))
            x = x + net.conv2d(y, "conv2", x.size(1), 3, padding=1, bias=False)
    return net.relu(x)


def two_summed(net: Net, x: Value) -> Value:
    """Sums two convolutions with their batch norms, and a third without (as RepVGG does)."""
    a = net.batch_norm(net.conv2d(x, "a", 5, 3, padding=1, bias=False), "a.norm")
    b = net.batch_norm(net.conv2d(x, "b", 5, 1), "b.norm")
    return net.relu(a + b + net.conv2d(x, "c", 5, 1))


def excited(net: Net, x: Value) -> Value:
    """Squeezes and excites images (Hu et al. 2018, arXiv:1709.01507), and adds them to others."""
    x = net.conv2d(x, "first", 24, 1)
    y = net.conv2d(x, "second", 24, 3, padding=1)
    gate = net.relu(net.conv2d(net.avg_pool2d(y), "squeeze", 3, 1))
    gate = net.op("sigmoid", [net.conv2d(gate, "excite", 24, 1)])
    return net.conv2d(net.relu(net.op("mul", [y, gate]) + x), "last", 4, 1)


def convnext(net: Net, x: Value) -> Value:
    """Norms the channels of images between permutes, as ConvNeXt's LayerNorm2d does."""
    for i in range(2):
        with net.at(i):
            c = x.size(1)
            y = net.conv2d(x, "depthwise", c, 3, padding=1, groups=c)
            y = net.layer_norm(net.permute(y, 0, 2, 3, 1), "norm", 1e-6)
            y = net.linear(net.gelu(net.linear(y, "fc1", 2 * c)), "fc2", c)
            y = net.op("mul", [y, net.weight("scale", c)])
            x = x + net.permute(y, 0, 3, 1, 2)
            down = net.permute(x, 0, 2, 3, 1)
            down = net.permute(net.layer_norm(down, "down.norm"), 0, 3, 1, 2)
            x = net.conv2d(down, "down", c + 2, 2, stride=2)
    return net.flatten(net.avg_pool2d(x))


def vit(net: Net, x: Value) -> Value:
    """Attends to patches and a class token: query, key and value of one x; pre-norm blocks."""
    x = net.conv2d(x, "embed", 6, 4, stride=4)
    c, t = x.size(1), x.size(2) * x.size(3)
    x = net.permute(net.reshape(x, BATCH, c, t), 0, 2, 1)
    token = net.expand(net.weight("class", 1, 1, c), BATCH, 1, c)
    x = net.concat([token, x], 1) + net.weight("positions", 1, t + 1, c)
    for i in range(2):
        with net.at(i):
            y = net.layer_norm(x, "norm1")
            x = x + net.linear(attend(net, [y] * 3, 2), "out", c)
            y = net.gelu(net.linear(net.layer_norm(x, "norm2"), "fc1", 2 * c))
            x = x + net.linear(y, "fc2", c)
    first = net.reshape(net.slice(x, 1, 0, 1), BATCH, c)
    return net.linear(net.layer_norm(first, "norm"), "head", 3)


def attend(net: Net, tokens: Sequence[Value], heads: int, scale: float | None = None) -> Value:
    """Attends from the first tokens [N, T, C] to the second and third."""
    c = tokens[0].size(2)
    parts = []
    for name, x in zip("qkv", tokens, strict=True):
        y = net.reshape(net.linear(x, name, c), BATCH, x.size(1), heads, c // heads)
        parts.append(net.permute(y, 0, 2, 1, 3))
    y = net.scaled_dot_product_attention(*parts, scale)
    return net.reshape(net.permute(y, 0, 2, 1, 3), BATCH, tokens[0].size(1), c)


def mixer(net: Net, x: Value, c: int = 8) -> Value:
    """Multiplies tokens, then channels (Tolstikhin et al. 2021, MLP-Mixer, arXiv:2105.01601)."""
    x = net.conv2d(x, "embed", c, 4, stride=4)
    t = x.size(2) * x.size(3)
    x = net.permute(net.reshape(x, BATCH, c, t), 0, 2, 1)
    for i in range(2):
        with net.at(i):
            y = net.permute(net.layer_norm(x, "norm1"), 0, 2, 1)
            y = net.linear(net.gelu(net.linear(y, "tokens.fc1", 16)), "tokens.fc2", t)
            x = x + net.permute(y, 0, 2, 1)
            y = net.gelu(net.linear(net.layer_norm(x, "norm2"), "fc1", 16))
            x = x + net.linear(y, "fc2", c)
    return net.linear(net.op("mean", [net.layer_norm(x, "norm")], axes=(1,)), "head", 3)


def swin(net: Net, x: Value, norms: str = "before") -> Value:
    """Multiplies windows of an image, which is rolled for it every other time (Swin, 2103.14030).

    Args:
        net: The network.
        x: Pixels.
        norms: Where the norms are: ``before`` the layers, or ``behind`` as in Swin v2 (2111.09883).
    """
    x = net.permute(net.conv2d(x, "embed", 8, 2, stride=2), 0, 2, 3, 1)
    _, h, w, c = x.shape
    for i, shift in enumerate((0, 1)):
        with net.at(i):
            y = net.layer_norm(x, "norm1") if norms == "before" else x
            y = rolled(net, y, -shift)
            y = net.permute(net.reshape(y, BATCH, h // 2, 2, w // 4, 4, c), 0, 1, 3, 2, 4, 5)
            y = net.linear(net.reshape(y, f"{h * w // 8}*{BATCH}", 8, c), "window", c)
            y = net.permute(net.reshape(y, BATCH, h // 2, w // 4, 2, 4, c), 0, 1, 3, 2, 4, 5)
            y = rolled(net, net.reshape(y, BATCH, h, w, c), shift)
            x = x + (net.layer_norm(y, "norm1") if norms == "behind" else y)
            tokens = net.reshape(x, BATCH, h * w, c)
            y = net.layer_norm(tokens, "norm2") if norms == "before" else tokens
            y = net.linear(net.gelu(net.linear(y, "fc1", 16)), "fc2", c)
            y = net.layer_norm(y, "norm2") if norms == "behind" else y
            x = net.reshape(tokens + y, BATCH, h, w, c)
    return net.op("mean", [x], axes=(1, 2))


def rolled(net: Net, x: Value, shift: int) -> Value:
    """Rolls an image [N, H, W, C] down and twice as far right."""
    return net.op("roll", [x], shifts=(shift, 2 * shift), axes=(1, 2)) if shift else x


def dense(net: Net, x: Value) -> Value:
    """Joins channels: its batch norms follow no convolution (Huang et al. 2017, DenseNet)."""
    for i in range(3):
        with net.at(i):
            y = net.relu(net.batch_norm(x, "norm"))
            x = net.concat([x, net.conv2d(y, "conv", 3, 3, padding=1, bias=False)], 1)
    return net.avg_pool2d(x, 2)


def gated(net: Net, x: Value) -> Value:
    """Scales channels by what it sees of the whole image (Hu et al. 2018, squeeze, excite)."""
    x = net.batch_norm(net.conv2d(x, "conv", 6, 3, padding=1), "norm")
    y = net.relu(net.conv2d(net.avg_pool2d(x), "squeeze", 2, 1))
    y = net.conv2d(y, "excite", 6, 1)
    return net.relu(net.op("mul", [x, y]) + y)


def heads(net: Net, x: Value) -> None:
    """Ends three times: the mean of all pixels, of windows, and of tokens."""
    x = net.relu(net.conv2d(x, "conv", 6, 3, stride=2))
    net.output("maps", x)
    net.output("the same maps", x)
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 4))
    net.output("windows", net.avg_pool2d(x, 3, stride=1, padding=1))
    tokens = net.permute(net.reshape(x, BATCH, 6, x.size(2) * x.size(3)), 0, 2, 1)
    net.output("tokens", net.layer_norm(tokens, "norm"))


def shared(net: Net, x: Value) -> None:
    """Uses a convolution on two sizes of an image, each with a batch norm of its own."""
    small = net.max_pool2d(x, 2, stride=2)
    for name, y in (("large", x), ("small", small)):
        y = net.conv2d(y, "conv", 4, 3, padding=1)
        net.output(name, net.relu(net.batch_norm(y, f"{name}.norm")))


def constants(net: Net, x: Value) -> Value:
    """Adds, multiplies and reshapes weights of every rank before it uses them."""
    c, h, w = (x.size(axis) for axis in (1, 2, 3))
    y = x + net.weight("whole", 1, c, h, w)
    y = net.op("mul", [y, net.relu(net.weight("by_row", h, w))])
    y = y + net.reshape(net.weight("flat", c), 1, c, 1, 1)
    filters = net.reshape(net.weight("filters", 4, c * 9), 4, c, 3, 3)
    y = net.op("conv2d", [y, filters], stride=1, padding=1, groups=1)
    tokens = net.reshape(net.permute(y, 0, 2, 3, 1), BATCH, h * w, 4)
    tokens = tokens + net.weight("positions", h * w, 4)
    return net.op("matmul", [tokens, net.weight("mix", 4, 5)])


def written(write: Callable[[Any, Net, Value], None], spec: Any) -> Callable[[Net, Value], None]:
    """Makes a network of a family and a row of its table."""
    return lambda net, x: write(spec, net, x)


def resnet_of(*args: Any, **kwargs: Any) -> Callable[[Net, Value], None]:
    """Makes a ResNet."""
    return written(resnet, ResNetSpec(*args, **kwargs))


def cvt_of(*stages: CvtStage, **rest: Any) -> Callable[[Net, Value], None]:
    """Makes a CvT."""
    return written(cvt, CvtSpec(stages, **rest))


NETS: dict[str, tuple[Callable[[Net, Value], Any], tuple[int, ...]]] = {
    "pre-activation": (pre_activation, (4, 6, 7)),
    "two summed": (two_summed, (3, 6, 7)),
    "convnext": (convnext, (4, 8, 9)),
    "vit": (vit, (3, 8, 12)),
    "mixer": (mixer, (3, 8, 12)),
    "swin": (swin, (3, 8, 24)),
    "dense": (dense, (3, 6, 8)),
    "gated": (gated, (3, 5, 6)),
    "excited": (excited, (3, 5, 6)),
    "heads": (heads, (3, 9, 8)),
    "shared": (shared, (3, 6, 8)),
    "constants": (constants, (3, 4, 5)),
    "resnet basic": (resnet_of("basic", (2, 1), (8, 12), 8, classes=5), (3, 32, 40)),
    "resnet bottleneck": (resnet_of("bottleneck", (2, 2), (16, 32), 32, classes=5), (3, 24, 24)),
    "efficientnet": (  # odd sizes, and even ones that are padded below and right alone
        written(
            efficientnet,
            EfficientNetSpec(
                (Stage(3, 1, 1, 6, 1), Stage(5, 2, 2, 8, 2), Stage(3, 2, 3, 8, 2)), 8, 20, classes=5
            ),
        ),
        (3, 24, 30),
    ),
    "resnet odd": (
        resnet_of("bottleneck", (2, 3), (12, 20), 6, 1, True, True, classes=3),
        (1, 37, 29),
    ),
    "resnet wide": (resnet_of("bottleneck", (2, 2), (256, 512), 64, classes=3), (3, 16, 16)),
    "cvt": (
        cvt_of(
            CvtStage(7, 4, 2, 64, 1, 1),
            CvtStage(3, 2, 1, 8, 2, 1),
            CvtStage(3, 2, 1, 16, 2, 2, cls_token=True),
            classes=5,
        ),
        (3, 32, 48),
    ),
    "cvt odd": (
        cvt_of(
            CvtStage(5, 3, 1, 12, 3, 1, 2.0, True, True, 5, 2, 2, 3),
            CvtStage(3, 2, 0, 12, 2, 2, 1.5, False, False, 3, 1, 0, 1),
            classes=2,
        ),
        (3, 25, 31),
    ),
}
"""Networks, and the shape of an image of each."""


class Random:
    """Writes a network down at random; what does not fit is tried no more.

    Args:
        dice: Where chance comes from.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.net = Net("random")
        shape = [dice.choice((2, 4, 6)), dice.randint(3, 7), dice.randint(3, 7)]
        self.values = [self.net.input("x", (BATCH, *shape))]
        self.layers = 0

    def program(self, steps: int) -> Program:
        """Gives the network after some steps; some of its values are outputs."""
        moves = [getattr(self, name) for name in dir(self) if name.startswith("move_")]
        for _ in range(steps):
            try:
                made = self.dice.choice(moves)(self.pick())
            except UserError:
                continue
            if made is not None and made.type.shape[0] == BATCH:
                self.values.append(made)
        for i, value in enumerate(self.values[1:]):
            if value is self.values[-1] or self.dice.random() < 0.1:
                self.net.output(f"y{i}", value)
        if len(self.values) == 1:
            self.net.output("y", self.values[0])
        return self.net.program()

    def pick(self, last: float = 0.7) -> Value:
        """Picks a value, most often the last."""
        return self.values[-1] if self.dice.random() < last else self.dice.choice(self.values)

    def layer(self) -> str:
        """Names a layer; now and then one that is there already, whose weights are shared."""
        if self.dice.random() > 0.1 or not self.layers:
            self.layers += 1
            return f"l{self.layers}"
        return f"l{self.dice.randint(1, self.layers)}"

    def weight(self, *shape: int) -> Value:
        self.layers += 1
        value = self.net.weight(f"w{self.layers}", *shape)
        chance = self.dice.random()
        if chance < 0.2:
            return self.net.relu(value)
        if chance < 0.4:
            return self.net.permute(value, *reversed(range(len(shape))))
        return value

    def shared(self, name: str, *shape: int) -> Value | None:
        """Adds a weight, or finds the one of that name if it has this shape; else nothing."""
        held = self.net._weights.get(name)
        return self.net.weight(name, *shape) if held is None or held.shape == shape else None

    def move_conv(self, x: Value) -> Value | None:
        if len(x.shape) != 4:
            return None
        layer, dice, c = self.layer(), self.dice, x.size(1)
        filters, k = dice.choice((c, c, 4, 6)), dice.choice((1, 1, 3))
        groups = c if filters == c and dice.random() < 0.2 else 1
        asked = {
            "stride": dice.choice((1, 1, 1, 2)), "padding": dice.choice((k // 2, k // 2, 0, 1)),
            "dilation": dice.choice((1, 1, 1, 2)), "groups": groups,
        }  # fmt: skip
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        keep = dice.random() < 0.5
        window = {n: v for n, v in asked.items() if keep or v != usual[n]}
        weights = [self.shared(f"{layer}.weight", filters, c // groups, k, k)]
        if weights[0] is None:
            return None
        if dice.random() < 0.5:
            weights.append(self.shared(f"{layer}.bias", filters))
            if weights[1] is None:
                return None
        return self.net.op("conv2d", [x, *weights], layer, **window)

    def move_conv_block(self, x: Value) -> Value | None:
        y = self.move_conv(x)
        if y is not None and self.dice.random() < 0.6:
            y = self.net.batch_norm(y, f"n{self.layers}.{len(self.values)}")
        if y is not None and self.dice.random() < 0.5:
            others = [each for each in self.values if each.shape == y.shape]
            if others:
                y = self.move_add(y)
        return self.net.relu(y) if y is not None and self.dice.random() < 0.5 else y

    def move_residual(self, x: Value) -> Value | None:
        """Adds a residual block, perhaps with a shortcut, and the next one's first convolution."""
        if len(x.shape) != 4:
            return None
        net, dice = self.net, self.dice
        with net.at(f"block{len(self.values)}"):
            stride, width = dice.choice((1, 1, 2)), dice.choice((x.size(1), 4, 6))
            y = net.relu(net.conv2d(x, "conv1", 4, 3, padding=1, stride=stride))
            k = dice.choice((1, 1, 3))
            y = net.conv2d(y, "conv2", width, k, padding=k // 2)
            if dice.random() < 0.3:
                x = y
            elif y.shape != x.shape or dice.random() < 0.5:
                x = net.conv2d(x, "shortcut", width, 1, stride=stride, bias=False)
            if dice.random() < 0.2:
                self.values.append(dice.choice([x, y]))
            y = net.relu(net.add(*dice.sample([x, y], 2)))
            self.values.append(y)
            return net.relu(net.conv2d(y, "next", 4, 1)) if dice.random() < 0.7 else y

    def move_gate(self, x: Value) -> Value | None:
        """Squeezes and excites images, perhaps with a residual."""
        if len(x.shape) != 4:
            return None
        net, dice, c = self.net, self.dice, x.size(1)
        with net.at(f"gate{len(self.values)}"):
            y = net.op("mean", [x], axes=(2, 3), keepdim=True)
            y = net.conv2d(y, "squeeze", dice.choice((1, 3)), 1)
            y = net.conv2d(net.relu(y) if dice.random() < 0.8 else y, "excite", c, 1)
            if dice.random() < 0.2:
                self.values.append(y)
            if dice.random() < 0.8:
                y = net.op("sigmoid", [y])
            y = net.op("mul", dice.sample([x, y], 2))
        return self.move_add(y) if dice.random() < 0.5 else y

    def move_stem(self, x: Value) -> Value | None:
        """Begins as networks of pixels do."""
        net, dice, x = self.net, self.dice, self.values[0]
        with net.at(f"stem{len(self.values)}"):
            y = net.conv2d(x, "conv", 4, 3, stride=dice.choice((1, 2)), padding=1)
            if dice.random() < 0.2:
                self.values.append(y)
            if dice.random() < 0.5:
                y = net.batch_norm(y, "norm")
            if dice.random() < 0.5:
                return net.max_pool2d(net.relu(y), 3, stride=2, padding=1)
            return net.layer_norm(net.permute(y, 0, 2, 3, 1), "layer_norm")

    def move_batch_norm(self, x: Value) -> Value | None:
        layer = f"{self.layer()}.norm"
        parts = [
            self.shared(f"{layer}.{part}", x.size(1)) for part in ("weight", "bias", "mean", "var")
        ]
        return None if None in parts else self.net.op("batch_norm", [x, *parts], layer)

    def move_relu(self, x: Value) -> Value:
        return self.net.relu(x)

    def move_gelu(self, x: Value) -> Value:
        return self.net.gelu(x)

    def move_add(self, x: Value) -> Value:
        same = [each for each in self.values if each.shape == x.shape] or [x]
        pair = [x, self.dice.choice(same)]
        self.dice.shuffle(pair)
        return self.net.add(*pair)

    def move_constant(self, x: Value) -> Value:
        sizes = [size if isinstance(size, int) else 1 for size in x.shape]
        sizes = [self.dice.choice((size, size, 1)) for size in sizes]
        value = self.weight(*sizes[self.dice.randint(0, len(sizes) - 1) :])
        pair = [x, value]
        self.dice.shuffle(pair)
        return self.net.op(self.dice.choice(("add", "mul")), pair)

    def move_pool(self, x: Value) -> Value | None:
        if len(x.shape) != 4:
            return None
        kernel = self.dice.choice((1, 2, 3))
        stride, padding = self.dice.choice((1, 2)), self.dice.choice((0, kernel // 2))
        pool = self.dice.choice((self.net.max_pool2d, self.net.avg_pool2d))
        return pool(x, kernel, stride=stride, padding=padding)

    def move_permute(self, x: Value) -> Value:
        axes = list(range(1, len(x.shape)))
        if len(axes) == 3 and self.dice.random() < 0.5:
            axes = self.dice.choice(([2, 3, 1], [3, 1, 2]))
        else:
            self.dice.shuffle(axes)
        return self.net.permute(x, 0, *axes)

    def move_reshape(self, x: Value) -> Value | None:
        sizes = [x.size(axis) for axis in range(1, len(x.shape))]
        at = self.dice.randrange(len(sizes))
        if self.dice.random() < 0.5 and len(sizes) > 1:
            at = self.dice.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        else:
            part = self.dice.choice([d for d in range(1, sizes[at] + 1) if sizes[at] % d == 0])
            sizes[at : at + 1] = [part, sizes[at] // part]
        return self.net.reshape(x, BATCH, *sizes) if len(sizes) < 5 else None

    def move_tokens(self, x: Value) -> Value | None:
        if len(x.shape) == 4:
            x = self.net.permute(x, 0, 2, 3, 1)
            return self.net.reshape(x, BATCH, x.size(1) * x.size(2), x.size(3))
        return None

    def move_layer_norm(self, x: Value) -> Value:
        return self.net.layer_norm(x, f"{self.layer()}.{x.size(-1)}.layer_norm")

    def move_linear(self, x: Value) -> Value | None:
        layer = self.layer()
        filters = self.dice.choice((x.size(-1), 4, 6))
        parts = [self.shared(f"{layer}.weight", filters, x.size(-1))]
        if self.dice.random() < 0.5:
            parts.append(self.shared(f"{layer}.bias", filters))
        return None if None in parts else self.net.op("linear", [x, *parts], layer)

    def move_mlp(self, x: Value) -> Value | None:
        if len(x.shape) != 3:
            return None
        with self.net.at(f"mlp{len(self.values)}"):
            y = self.net.layer_norm(x, "norm")
            y = self.net.gelu(self.net.linear(y, "fc1", 4))
            y = self.net.linear(y, "fc2", x.size(2))
        return self.net.add(*self.dice.sample([x, y], 2))

    def move_attend(self, x: Value) -> Value | None:
        if len(x.shape) != 3:
            return None
        others = [y for y in self.values if len(y.shape) == 3 and y.shape[2] == x.shape[2]]
        k = self.dice.choice([x, *others])
        v = self.dice.choice([y for y in [k, *others] if y.shape == k.shape])
        divisors = [d for d in range(1, x.size(2) + 1) if x.size(2) % d == 0]
        with self.net.at(f"attend{len(self.values)}"):
            return attend(self.net, [x, k, v], self.dice.choice(divisors))

    def move_projections(self, x: Value) -> Value | None:
        """Attends as CvT does: three depthwise convolutions of normed tokens."""
        if len(x.shape) != 3:
            return None
        net, dice, c = self.net, self.dice, x.size(2)
        token = dice.random() < 0.5
        count = x.size(1) - token
        h = dice.choice([d for d in range(1, count + 1) if count % d == 0] or [0])
        if not h:
            return None
        with net.at(f"projections{len(self.values)}"):
            y = net.layer_norm(x, "norm")
            first = net.slice(y, 1, 0, 1) if token else None
            rest = net.slice(y, 1, 1, x.size(1)) if token else y
            image = net.permute(net.reshape(rest, BATCH, h, count // h, c), 0, 3, 1, 2)
            stride, parts = dice.choice((1, 2)), []
            for i, name in enumerate("abc"):
                z = net.conv2d(
                    image, name, c, 3, padding=1, stride=stride if i else 1, groups=c,
                    bias=dice.random() < 0.5,
                )  # fmt: skip
                z = net.permute(z, 0, 2, 3, 1)
                z = net.reshape(z, BATCH, z.size(1) * z.size(2), c)
                parts.append(z if first is None else net.concat([first, z], 1))
            if dice.random() < 0.2:
                self.values.append(dice.choice([z for z in (y, first, rest, image) if z]))
            return attend(net, parts, 1)

    def move_first_token(self, x: Value) -> Value | None:
        if len(x.shape) != 3:
            return None
        first = self.net.slice(x, 1, 0, 1)
        first = self.net.reshape(first, BATCH, x.size(2))
        return self.net.layer_norm(first, f"{self.layer()}.{x.size(2)}.layer_norm")

    def move_class_token(self, x: Value) -> Value | None:
        if len(x.shape) != 3:
            return None
        c, count = x.size(2), self.dice.choice((1, 1, 2))
        token = self.net.expand(self.weight(*([1, 1, c] if c > 1 else [1] * 3)), BATCH, count, c)
        return self.net.concat(self.dice.choice(([token, x], [token, x], [x, token])), 1)

    def move_slice(self, x: Value) -> Value:
        axis = self.dice.randrange(1, len(x.shape))
        start = self.dice.randrange(x.size(axis))
        return self.net.slice(x, axis, start, self.dice.randint(start + 1, x.size(axis)))

    def move_concat(self, x: Value) -> Value:
        return self.net.concat([x, self.pick(0.3)], self.dice.randrange(1, len(x.shape)))
