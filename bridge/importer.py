"""What both importers stand on: values, constants, and what has no counterpart.

A rule of bridge/aten.py or bridge/onnx_ops.py takes an ``Importer``, whose ``net`` it adds ops to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from maxvision.graphs.net import Net, Value
from maxvision.graphs.program import Program
from maxvision.graphs.types import BATCH, Size, at_batch, multiple, split

AT = "at "
"""What comes before the path of a module in the name of a point that is compared."""
PROBES = (2, 3)
"""The batches for which a constant is computed whose shape hangs on the batch."""


class Unsupported(Exception):
    """Says what an op has that no op here has."""


@dataclass(frozen=True)
class Known:
    """A tensor that no input decides, of torch or numpy.

    Attributes:
        values: It, or, if its shape hangs on the batch, what it is for each of ``PROBES``.
        name: The parameter or buffer that it is, if it is one.
        steps: Of weights that are 8-bit integers in the source, what 1 stands for, for each of
            them.
    """

    values: tuple[Any, ...]
    name: str = ""
    steps: Any = None


def known_weight(given: Any) -> Known:
    """Makes sure that no input decides a weight."""
    if not isinstance(given, Known):
        raise Unsupported("weights that are computed from the input")
    return given


@dataclass(frozen=True)
class Missing:
    """An op that has no counterpart here.

    Attributes:
        op: Its name.
        why: What it has that we do not.
        origin: The line of the module, or the node of the file.
    """

    op: str
    why: str
    origin: str


class Reference(Protocol):
    """Computes what a program should: the module, or the file, that it came from."""

    name: str
    """Who computes: ``torch``, ``onnxruntime``, ``onnx``."""

    def __call__(
        self, inputs: Sequence[Any], points: Collection[str], dtype: str = "float32"
    ) -> dict[str, np.ndarray]:
        """Computes the outputs by their names, and the points by ``AT`` and their paths.

        Args:
            inputs: The inputs in their order.
            points: Paths, of ``Traced.points``.
            dtype: What to compute in.
        """


@dataclass
class Traced:
    """What a model became.

    Attributes:
        program: The program; None if ops are missing.
        tensors: Its weights, by their names in the source.
        outputs: The name of each output, in the source's order.
        points: Values to compare with the source's: the path of a module, and the value that
            leaves it.
        missing: What could not be translated.
        notes: What was translated, but not as one would expect.
        reference: What computes the same in the source's framework.
    """

    program: Program | None
    tensors: dict[str, np.ndarray]
    outputs: list[str]
    points: dict[str, str] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: Reference | None = None


class Importer:
    """A program in the making, and its weights.

    Attributes:
        net: The program.
        tensors: The weights by name.
        reserved: Names that parameters of the source have.
        missing: What could not be translated.
        notes: What was translated, but not as one would expect.
        exact: Whether values keep the dtypes of the source; else all floats have one.
        floats: What weights and constants of floats become: float32, or float64.
    """

    exact = False
    floats = "float32"

    def __init__(self, name: str, reserved: set[str]) -> None:
        self.net = Net(name)
        self.tensors: dict[str, np.ndarray] = {}
        self.reserved = reserved
        self.missing: list[Missing] = []
        self.notes: list[str] = []
        self._known: dict[Any, Value] = {}  # by a parameter's name, or by what a constant holds

    def value(self, given: Any) -> Value:
        """Makes a value of the program: what is known becomes a weight, repeated if need be."""
        if isinstance(given, Value):
            return given
        if not isinstance(given, Known):
            raise Unsupported(f"a {type(given).__name__} in the place of a tensor")
        held, shape = _stored(given, self.floats)
        key: Any = given.name or (held.dtype.str, held.shape, sha256(held.tobytes()).digest())
        if key not in self._known:
            name = given.name or f"constants.{len(self.tensors)}"
            while self.net.has(name):  # an op is called so
                name += ".value"
            self.tensors[name] = held
            self._known[key] = self.net.weight(name, *held.shape, dtype=held.dtype.name)
        return self._repeated(self._known[key], shape)

    def _repeated(self, weight: Value, shape: tuple[Size, ...]) -> Value:
        """Repeats a constant for each image: sizes of 1, or all that belongs to one image."""
        if weight.shape == shape:
            return weight
        parts: list[Size] = []
        full: list[Size] = []
        for held, wanted in zip(weight.shape, shape, strict=True):
            assert isinstance(held, int)
            several = held not in (1, wanted)
            parts += [1, held] if several else [held]
            full += [BATCH, held] if several else [wanted]
        y = weight if len(parts) == len(shape) else self.net.reshape(weight, *parts)
        y = self.net.expand(y, *full)
        return y if len(full) == len(shape) else self.net.reshape(y, *shape)

    def weight(self, given: Any) -> Value:
        """Gives a parameter; one that is computed from activations is none."""
        return self.value(known_weight(given))

    def constant(self, tensor: Any) -> Value:
        """Makes a weight of a tensor that the source does not have; equal ones are one."""
        return self.value(Known((tensor,)))

    def empty(self) -> Known:
        """Gives a tensor without numbers, for what is put together with others."""
        return Known((np.empty(0, np.float32),))

    def applied(self, given: Any, change: Callable[[Any], Any]) -> Known:
        """Changes a tensor that is known: where its numbers lie, or all by a factor."""
        known = known_weight(given)
        steps = None if known.steps is None else change(known.steps)
        return Known(tuple(change(each) for each in known.values), steps=steps)

    def layer(self, module: str, weight: Any, bias: Any = None) -> tuple[str, list[Value]]:
        """Names a layer, and gives its weights.

        Args:
            module: What to call the layer if its weight is no parameter of the source.
            weight: Its weight; so is the bias, if there is one.
            bias: See ``weight``.
        """
        weight = known_weight(weight)
        if not weight.name.endswith(".weight"):
            layer, number = module or "layer", 1
            while f"{layer}.weight" in self.reserved:
                number += 1
                layer = f"{module or 'layer'}.{number}"
            weight = self._renamed(weight, f"{layer}.weight")
        layer = weight.name.removesuffix(".weight")
        found = [self._rounded(layer, weight)]
        if bias is not None:
            if isinstance(bias, Known) and not bias.name and f"{layer}.bias" not in self.reserved:
                bias = self._renamed(bias, f"{layer}.bias")
            found.append(self.weight(bias))
        return layer, found

    def traced(
        self,
        outputs: list[str],
        points: Mapping[str, tuple[str, str]],
        reference: Callable[[list[str], dict[str, str]], Reference],
    ) -> Traced:
        """Gives what the model became.

        Args:
            outputs: The name of each output.
            points: The path of a module, and what leaves it: the value, and its name in the source.
            reference: Makes the reference, of the outputs and the names in the source.
        """
        if self.missing:
            points = {}
        return Traced(
            program=None if self.missing else self.net.program(),
            tensors=self.tensors,
            outputs=outputs,
            points={path: value for path, (value, _) in points.items()},
            missing=self.missing,
            notes=self.notes,
            reference=reference(outputs, {path: name for path, (_, name) in points.items()}),
        )

    def _renamed(self, given: Known, name: str) -> Known:
        self.reserved.add(name)
        return replace(given, name=name)

    def _rounded(self, layer: str, weight: Known) -> Value:
        """Gives a layer's weight, rounded if it is of 8-bit integers in the source."""
        found = self.weight(weight)
        if weight.steps is None:
            return found
        steps = np.asarray(weight.steps).reshape(len(weight.steps), -1)
        whole = np.rint(weight.values[0].reshape(steps.shape) / np.where(steps == 0, 1, steps))
        if (steps != steps[:, :1]).any():
            why = "its weights have other scales than one for each filter"
        elif whole.min(initial=0) < -128 or whole.max(initial=0) > 127:
            why = "its weights have a zero point"
        else:
            scale = self._renamed(Known((steps[:, 0].copy(),)), f"{layer}.scale")
            return self.net.op("fake_quantize_filter", [found, self.weight(scale)])
        self.notes.append(f"{layer} runs in floats: {why}")
        return found


def size_from(sizes: Sequence[int]) -> Size | None:
    """Gives the size that is these numbers for ``PROBES``; None if there is no such size."""
    if len(set(sizes)) == 1:
        return sizes[0]
    size = multiple(sizes[0] // PROBES[0], BATCH)
    return size if [at_batch(size, batch) for batch in PROBES] == [*sizes] else None


def array(tensor: Any, floats: str = "float32") -> np.ndarray:
    """Makes a numpy array of a tensor; its floats become those of that name."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().contiguous()
        narrow = tensor.is_floating_point() and tensor.element_size() < 8  # numpy has no bfloat16
        tensor = (tensor.float() if narrow else tensor).numpy()
    made = np.require(tensor, requirements="C")  # ascontiguousarray gives a scalar an axis
    return made.astype(floats) if made.dtype.kind == "f" else made


def _stored(given: Known, floats: str) -> tuple[np.ndarray, tuple[Size, ...]]:
    """Gives what to store of a constant, and its shape; images that are equal are stored once."""
    first = array(given.values[0], floats)
    if len(given.values) == 1:
        return first, first.shape
    found = [first, array(given.values[1], floats)]
    shape: list[Size] = []
    for axis in range(first.ndim):
        size = size_from([each.shape[axis] for each in found])
        if size is None:
            raise Unsupported("a constant whose shape is not a multiple of the batch")
        shape.append(size)
        each, name = split(size)
        if not name:
            continue
        one = found[0].take(range(each), axis)
        nan = one.dtype.kind == "f"
        for x, batch in zip(found, PROBES, strict=True):
            if not np.array_equal(np.concatenate([one] * batch, axis), x, equal_nan=nan):
                raise Unsupported("a constant that differs from image to image")
        found = [one, found[1].take(range(each), axis)]
    if not np.array_equal(found[0], found[1], equal_nan=first.dtype.kind == "f"):
        raise Unsupported("a constant that differs from batch to batch")
    return np.require(found[0], requirements="C"), tuple(shape)
