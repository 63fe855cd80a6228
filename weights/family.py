"""What a family of networks is: its table, its network, and how checkpoints store it.

A family is a file in weights/families, which gives one ``FAMILY``; or an entry point of another
package in the group ``maxvision.families``. docs/adding-a-model.md shows one.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from maxvision.common.errors import ModelError
from maxvision.graphs.net import Net, Value
from maxvision.graphs.program import Program
from maxvision.graphs.types import BATCH
from maxvision.weights import families
from maxvision.weights.layout import Shape
from maxvision.weights.rules import Rules, key_for

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "maxvision.families"
"""The entry points of families in other packages."""


class Spec(Protocol):
    """A network's shape: a row of a family's table."""

    @property
    def channels(self) -> int:
        """Channels of the image."""

    @property
    def classes(self) -> int:
        """Number of logits."""

    def to_config(self) -> dict[str, Any]:
        """Describes it as a config.json does; labels and channels are added to that."""


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pictures, channel by channel; 1 is white."""


@dataclass(frozen=True)
class Pictures:
    """How pictures are prepared for a network.

    Attributes:
        edge: Side of the square that is cut out of the middle, px.
        resized: Shorter side before that, px.
        resample: How they are resized: ``bicubic``, ``bilinear``, ....
        mean: Of each channel, 1 is white; ImageNet's by default.
        std: Deviation of each channel.
    """

    edge: int = 224
    resized: int = 256
    resample: str = "bicubic"
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


@dataclass(frozen=True)
class Format:
    """One way to store a family.

    Attributes:
        title: What a message calls it.
        rules: Its name map.
        infer: Makes a spec of the shapes of the weights, by their names here, and the number of
            classes; None where a config.json must describe the network.
        pictures: Says how pictures are prepared for a spec, where nothing in the checkpoint does.
        timm: The architectures of timm's config.json that are stored like this.
        unlike: Says of tensors (shapes by their keys) what network they are, if it is a relative
            that does not run here: ``"this is a ResNeXt, whose ... cannot run"``; else None.
    """

    title: str
    rules: Rules
    infer: Callable[[Mapping[str, Shape], int], Any] | None = None
    pictures: Callable[[Any], Pictures] = lambda _: Pictures()
    timm: tuple[str, ...] = ()
    unlike: Callable[[Mapping[str, Shape]], str | None] | None = None

    @property
    def has_config(self) -> bool:
        """Whether a config.json must describe it, as on the Hugging Face hub."""
        return self.infer is None

    def key(self, weight: str) -> str:
        """Returns the checkpoint key of ``weight``."""
        return key_for(self.rules, weight)


@dataclass(frozen=True)
class Family:
    """A family of networks.

    Attributes:
        name: What config.json calls it, its ``model_type``.
        read: Makes a spec of a config.json and the number of classes.
        write: Writes the network of a spec down on images x[N, C, H, W] (graphs/net.py). Its
            outputs are ``logits``, ``features`` and ``stages.0``, ...; its classifier is the layer
            ``head``, and no weight's shape depends on the images' size.
        formats: How it is stored; the first is with a config.json, as ``convert`` writes it.
        architectures: Of config.json: the class of transformers.
        dense: Layers that pruning leaves dense by default: few weights, on which all depend.
        first_stage: Which of transformers' hidden states is that behind the first stage.
    """

    name: str
    read: Callable[[dict[str, Any], int], Any]
    write: Callable[[Any, Net, Value], None]
    formats: tuple[Format, ...]
    architectures: tuple[str, ...] = ()
    dense: tuple[str, ...] = ("head",)
    first_stage: int = 0

    def __post_init__(self) -> None:
        if not self.formats or not self.formats[0].has_config:
            raise ValueError(
                f"{self.name}: the first of formats is the one with a config.json, so it has no"
                " infer"
            )

    def program(self, spec: Any, size: tuple[int, int]) -> Program:
        """Writes the network of a spec down for images of ``size`` px."""
        net = Net(self.name)
        self.write(spec, net, net.input("x", (BATCH, spec.channels, *size)))
        return net.program()


@cache
def ours(name: str) -> Family | None:
    """Imports a family of weights/families, a file of its name."""
    if importlib.util.find_spec(f"{families.__name__}.{name}") is None:
        return None
    family: Family = importlib.import_module(f"{families.__name__}.{name}").FAMILY
    return family


@cache
def known() -> dict[str, Family]:
    """Lists all families by name: ours, then other packages'. The first of a name counts.

    Raises:
        ModelError: If a package's family cannot be loaded.
    """
    from importlib.metadata import entry_points

    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    found = {family.name: family for name in names if (family := ours(name))}
    for entry in entry_points(group=GROUP):
        family = _load(entry)
        found.setdefault(family.name, family)
    return found


def find(name: str) -> Family | None:
    """Finds a family; other packages are asked only for one that is not ours."""
    family = ours(name) if name.isidentifier() else None
    return family or known().get(name)


def _load(entry: EntryPoint) -> Family:
    try:
        family = entry.load()
        if not isinstance(family, Family):
            raise TypeError(f"it is a {type(family).__name__}, not a Family")
    except Exception as error:
        package = entry.dist.name if entry.dist else "its package"
        raise ModelError(
            f"the family {entry.name} ({entry.value}) cannot be loaded: {error!r}; repair or"
            f" uninstall {package}"
        ) from error
    return family


def formats() -> list[tuple[Family, Format]]:
    """Lists the formats of all families."""
    return [(family, form) for family in known().values() for form in family.formats]


def names() -> str:
    """Names the families, for messages."""
    *rest, last = known()
    return f"{', '.join(rest)} and {last}"
