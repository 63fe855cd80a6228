"""Pictures become labels: a checkpoint, compiled, with its preprocessing.

model = load("microsoft/resnet-50", device="gpu")
model.classify("cat.jpg", top_k=5)
"""

from __future__ import annotations

import os
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

import numpy as np
from max.driver import Device
from max.dtype import DType
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, KernelLibrary

from maxvision.common.arguments import DECODE
from maxvision.common.errors import ArgumentError, DeviceError, ImageError, ModelError
from maxvision.graphs import formats, sparsity
from maxvision.graphs import passes as rewriting
from maxvision.graphs.backend import Backend
from maxvision.graphs.layers import Layer, layers
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.pixels import MEAN, SCALE, from_pixels
from maxvision.graphs.program import Program
from maxvision.graphs.sparsity import Choice, Chosen
from maxvision.graphs.target import Target
from maxvision.runtime import artifact, jpeg, nvjpeg
from maxvision.runtime.artifact import Package
from maxvision.runtime.devices import find_device, find_dtype, parse_device
from maxvision.runtime.executor import Executor, Lowering, Watch, initialised
from maxvision.runtime.executor import load as load_ops
from maxvision.runtime.jpeg import Picture
from maxvision.runtime.nvjpeg import Batch, Decoder
from maxvision.runtime.predictions import Prediction, likeliest, softmax
from maxvision.runtime.preprocess import Pixels, Preprocess, Source, load_batch
from maxvision.runtime.replay import IMAGES

if TYPE_CHECKING:
    from maxvision.weights import Checkpoint

SomeSource = TypeVar("SomeSource", bound=Source)
"""An image of one kind; ``list`` is invariant, so that list[str] is no list[Source]."""

Described = TypeVar("Described", "Checkpoint", Package)
"""What says of a model how its pictures are prepared, and what its classes are called."""


@dataclass(frozen=True)
class Features:
    """Everything a network computes on the way: float32 arrays.

    Attributes:
        logits: [N, classes].
        features: [N, C], what the classifier reads.
        stages: [N, P, Q, C] after each stage.
    """

    logits: np.ndarray
    features: np.ndarray
    stages: list[np.ndarray]


class Key(NamedTuple):
    """What a classifier's executors differ in; see ``network``."""

    size: tuple[int, int]
    pixels: str
    everything: bool


def load(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tf32: bool = True,
    sparse: str = "auto",
    batch_size: int | None = None,
    revision: str | None = None,
    labels: str | os.PathLike[str] | Sequence[str] | None = None,
    passes: str = "all",
    decode: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Classifier:
    """Loads a classifier and compiles it.

    Args:
        source: A bundled model's name, a Hugging Face hub id, a folder, or a file of weights;
            see ``weights.load``. Or a folder that ``maxvision compile`` wrote.
        device: ``cpu``, ``gpu``, ``gpu:N``, or ``auto``: the first GPU if there is one.
        dtype: ``float32``, ``bfloat16`` or ``float16`` for activations and filters (a CPU takes
            the first two); ``auto`` is float32.
        tf32: Whether NVIDIA's tensor cores may round float32 to TF32 (10 bits of mantissa) before
            they multiply, several times as fast; other devices multiply float32 exactly.
        sparse: What runs the pruned layers of a model (graphs/sparsity.py): ``auto``, sparse
            convolutions where measurements say that they are faster; ``always``; ``never``.
        batch_size: Images that ``classify`` runs at a time; 32 on a GPU and 8 on a CPU if None. If
            given, ``auto`` chooses for batches of that size.
        revision: Branch, tag or commit on the hub.
        labels: A name for each class, in order, or a file of them (``weights.read_labels``). If
            None, those of the model's config.json; without any, ImageNet's for 1,000 classes, else
            "class 0", "class 1", ....
        passes: How the network is rewritten (graphs/passes): ``all``, ``none``, ``-stem,-chain``
            for all but these, ``qkv,mlp`` for these alone. To find the one to blame for an answer.
        decode: Where JPEGs are decoded: ``cpu``; ``gpu``, by nvImageCodec (runtime/nvjpeg.py), but
            for those that it does not take; ``auto``, on the GPU that the network runs on if that
            package is installed; ``fast``, on the CPU, large ones at a fraction of their size
            (``Preprocess.fast``).
        progress: Called with a sentence before each step that takes time.

    Raises:
        ModelError: If the model cannot be found, read or run.
        DeviceError: If the device or the dtype is not to be had.
        ArgumentError: If an argument is none of the above, or the labels do not fit the model.
    """
    if batch_size is not None and batch_size < 1:
        raise ArgumentError(f"batch_size must be at least 1 but is {batch_size}")
    sparsity.check_mode(sparse)  # before anything that takes long
    off = rewriting.parse(passes)
    if decode not in DECODE:
        raise ArgumentError(f"decode must be {' or '.join(DECODE)} but is {decode!r}")
    names: list[str] | None = None
    if labels is not None:
        from maxvision.weights import read_labels

        names = read_labels(labels)
    if artifact.is_here(source):
        if revision is not None:
            raise ArgumentError(f"{source} is compiled already and has no revision; leave it out")
        if off:
            raise ArgumentError(
                f"{source} is compiled already; omit --passes, or compile it again with them"
            )
        return _unpack(source, device, dtype, batch_size, tf32, sparse, names, decode)
    from maxvision import weights

    place = find_device(device)
    kind = find_dtype(dtype, place)
    watch = Watch()
    checkpoint = weights.load(source, revision=revision, progress=progress)
    watch.lap("weights")
    checkpoint = _relabelled(checkpoint, names)
    model = Classifier(
        checkpoint, place, kind, batch_size, watch, tf32=tf32, sparse=sparse, off=off
    )
    model.choose_decoder(decode)
    model.compile(progress)
    return model


def _unpack(
    source: str,
    device: str,
    dtype: str,
    batch_size: int | None,
    tf32: bool,
    sparse: str,
    names: list[str] | None,
    decode: str,
) -> Classifier:
    """Loads a model that was compiled ahead of time."""
    watch = Watch()
    packed = _relabelled(artifact.read(source), names)
    watch.lap("weights")
    kind, index = parse_device(device)
    if kind not in ("auto", "cpu" if packed.target.api == "cpu" else "gpu"):
        raise DeviceError(
            f"{packed.name} was compiled for {packed.target.name} but device is {device};"
            " omit --device, or compile it for that device"
        )
    if dtype not in ("auto", packed.dtype):
        raise DeviceError(
            f"{packed.name} was compiled in {packed.dtype} but dtype is {dtype};"
            " omit --dtype, or compile it in that dtype"
        )
    if packed.tf32 and not tf32:
        raise DeviceError(
            f"{packed.name} was compiled to round float32 to TF32; compile it with --no-tf32"
        )
    if sparse not in ("auto", packed.sparse.mode):
        raise DeviceError(
            f"{packed.name} was compiled with sparse {packed.sparse.mode} but sparse is {sparse};"
            f" omit it, or compile with --sparse {sparse}"
        )
    place = packed.target.open(index)
    model = Classifier(packed, place, DType[packed.dtype], batch_size, watch, tf32=packed.tf32)
    model.choose_decoder(decode)
    model.compile()
    return model


def _relabelled(model: Described, names: list[str] | None) -> Described:
    """Gives a model's description with the user's labels, if there are any."""
    if names is None:
        return model
    from maxvision.weights import match_labels

    return replace(model, labels=match_labels(names, model.labels, model.name))


def network(
    checkpoint: Checkpoint,
    size: tuple[int, int],
    dtype: str,
    *,
    pixels: str = "uint8",
    everything: bool = False,
) -> Program:
    """Writes a checkpoint's network down for pictures of one size, any batch.

    Args:
        checkpoint: The model.
        size: Height and width in px.
        dtype: Of activations.
        pixels: ``uint8`` levels, which the program normalises, or ``float32``, normalised already.
        everything: Give features and stages beside the logits.

    Raises:
        ModelError: If levels cannot be normalised, as the model has other channels than pictures.
    """
    mean = Preprocess.from_config(checkpoint.preprocess).mean
    if pixels == "uint8" and checkpoint.channels != len(mean):
        raise ModelError(
            f"{checkpoint.name}: pictures have {len(mean)} channels but the model takes"
            f" {checkpoint.channels}; give it float32 pixels that are normalised already"
        )
    program = checkpoint.program(size)
    stages = [name for name in program.outputs if name.startswith("stages.")]
    outputs = ["logits", "features", *stages] if everything else ["logits"]
    return from_pixels(program.keep(outputs), pixels, dtype)


def weights_of(checkpoint: Checkpoint) -> Mapping[str, np.ndarray]:
    """Gives what ``network`` asks for: the checkpoint's weights, and how pixels are normalised."""
    preprocess = Preprocess.from_config(checkpoint.preprocess)
    levels: dict[str, np.ndarray] = {
        MEAN: np.array(preprocess.mean, np.float32),
        SCALE: 1 / np.array(preprocess.std, np.float32),
    }
    return ChainMap(levels, checkpoint.tensors)  # type: ignore[arg-type]


def build(
    checkpoint: Checkpoint,
    device: DeviceRef,
    dtype: DType,
    *,
    size: tuple[int, int],
    pixels: DType = DType.uint8,
    everything: bool = False,
    tf32: bool = True,
    sparse: Mapping[str, str] | None = None,
    off: Collection[str] = (),
    kernels: KernelLibrary | None = None,
) -> tuple[Graph, Parameters]:
    """Builds the graph of a checkpoint's network; see ``network`` and ``Lowering``.

    Returns:
        The graph, and the weights that it asks for.
    """
    program = network(checkpoint, size, dtype.name, pixels=pixels.name, everything=everything)
    lowering = Lowering(dtype.name, tf32, sparse or {}, off)
    graph, parameters, _ = lowering.build(program, weights_of(checkpoint), device, kernels)
    return graph, parameters


def choose_sparse(
    checkpoint: Checkpoint,
    mode: str,
    target: Target,
    dtype: DType,
    size: tuple[int, int],
    batch: int | None = None,
    *,
    tf32: bool = True,
) -> Choice:
    """Chooses which layers of a checkpoint's network run as sparse convolutions.

    Args:
        checkpoint: The model.
        mode: ``auto``, ``always`` or ``never``.
        target: What the graph is for.
        dtype: Of activations and filters.
        size: Height and width of the images in px.
        batch: Images that will run together; any number of them if None.
        tf32: Whether a GPU may round float32 to TF32 for dense products.

    Raises:
        ArgumentError: If there is no such mode.
        DeviceError: If ``always`` is asked of a device that has no sparse kernel for the dtype.
        ModelError: If ``always`` is asked of a model without a pruned layer.
    """
    program = checkpoint.program(size)
    found = layers(program)
    zeros = {each.name: checkpoint.zeros(each.name) for each in found}
    if mode == "auto" and max(zeros.values(), default=0) >= sparsity.PRUNED:
        found = layers(
            program, rewriting.run(program, Backend(target.api, dtype.name, {}, target.name))
        )

    def formats_of(layer: Layer) -> tuple[str, ...]:
        stored = checkpoint.tensors[f"{layer.name}.weight"]
        filters = stored.transpose(2, 3, 1, 0) if stored.ndim == 4 else stored.T[None, None]
        return formats.suited(filters, layer.groups, target, dtype)

    return sparsity.choose(
        checkpoint.name,
        found,
        zeros,
        mode,
        target,
        dtype,
        tf32=tf32,
        formats_of=formats_of,
        batch=batch,
    )


class Classifier:
    """A classifier on a device.

    Attributes:
        name: What it was loaded as.
        family: What its network is called, such as ``resnet``.
        channels: Of its images.
        device: ``cpu`` or ``gpu:N``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        tf32: Whether products of float32 are rounded to TF32 first.
        labels: A name for each class.
        preprocess: Turns an image into the pixels that the model takes.
        decoder: Does so with JPEGs on the GPU, if anything does (``choose_decoder``).
        batch_size: Images that ``classify`` runs at a time.
        seconds: What making it ready took: ``weights`` (finding, checking), ``graph`` (building,
            looking up), ``compile`` (if it had to be), ``load`` (arranging, initialising).
    """

    def __init__(
        self,
        source: Checkpoint | Package,
        device: Device,
        dtype: DType,
        batch_size: int | None = None,
        watch: Watch | None = None,
        *,
        tf32: bool = True,
        sparse: str = "auto",
        off: Collection[str] = (),
    ) -> None:
        self.name = source.name
        self.family = source.family
        self.channels = source.channels
        self.device = "cpu" if device.is_host else f"gpu:{device.id}"
        self.dtype = dtype.name
        self.tf32 = tf32 and dtype == DType.float32 and device.api == "cuda"
        self.labels = source.labels
        self.preprocess = Preprocess.from_config(source.preprocess)
        self.decoder: Decoder | None = None
        self._prepare: Callable[[Preprocess, Source], Pixels] = Preprocess.__call__
        self._asked = batch_size
        self.batch_size = batch_size or (8 if device.is_host else 32)
        self._source = source
        self._sparse = sparse
        self._off = frozenset(off)
        self._choices: dict[tuple[int, int], Choice] = {}
        self._device = device
        self._executors: dict[Key, Executor] = {}
        self._lock = threading.Lock()
        self._watch = watch or Watch()
        self.seconds = self._watch.seconds

    def __repr__(self) -> str:
        height, width = self._size
        precision = f"{self.dtype}, TF32," if self.tf32 else self.dtype
        return (
            f"Classifier({self.name!r}, {self.family}, {len(self.labels):,} classes,"
            f" {height} x {width} px, {precision} on {self.device})"
        )

    def __call__(self, pixels: np.ndarray | Batch) -> np.ndarray:
        """Computes the logits [N, classes] of pixels [N, H, W, C]; any thread may call.

        On a GPU a batch size is captured when it comes for the second time (runtime/replay.py), or
        by ``prepare``.

        Args:
            pixels: uint8 levels as ``preprocess`` gives them, or float32 that are normalised
                already. Another size than the preprocessing's compiles once more. Or what
                ``decoder`` has decoded.

        Raises:
            ArgumentError: If shape or dtype do not fit.
        """
        return self._run(pixels, everything=False)[0]

    def features(self, pixels: np.ndarray | Batch) -> Features:
        """Computes logits, features and the stages of pixels (see ``__call__``)."""
        logits, features, *stages = self._run(pixels, everything=True)
        return Features(logits, features, stages)

    def stages(self, pixels: np.ndarray) -> list[np.ndarray]:
        """Computes the feature map [N, P, Q, C] after each stage of pixels (see ``__call__``)."""
        return self.features(pixels).stages

    @overload
    def classify(self, images: Source, top_k: int = 5) -> list[Prediction]: ...

    @overload
    def classify(self, images: list[Source], top_k: int = 5) -> list[list[Prediction]]: ...

    @overload
    def classify(self, images: list[SomeSource], top_k: int = 5) -> list[list[Prediction]]: ...

    def classify(
        self, images: Source | list[SomeSource], top_k: int = 5
    ) -> list[Prediction] | list[list[Prediction]]:
        """Classifies an image, or a list of images.

        Args:
            images: A path; the bytes of a file; an open binary file; a PIL image; or an array
                [H, W], [H, W, 1], [H, W, 3] (RGB) or [H, W, 4] (RGBA). Or a list of them.
            top_k: Classes to name, the likeliest first.

        Returns:
            The predictions of the image; of a list, one such list an image.

        Raises:
            ImageError: If an image cannot be read.
            ArgumentError: If ``top_k`` is below 1.
        """
        if top_k < 1:
            raise ArgumentError(f"top_k must be at least 1 but is {top_k}")
        sources: Sequence[Source] = images if isinstance(images, list) else [images]
        answers: list[list[Prediction]] = []
        for start in range(0, len(sources), self.batch_size):
            some = sources[start : start + self.batch_size]
            pictures: list[Picture] = []
            for item in load_batch(some, self.read):
                if isinstance(item, ImageError):
                    raise item
                pictures.append(item)
            rows = self.run(pictures, some)
            for row in rows:
                if isinstance(row, ImageError):
                    raise row
            answers += self.predictions(np.stack(rows), top_k)  # type: ignore[arg-type]
        return answers if isinstance(images, list) else answers[0]

    def read(self, source: Source) -> Picture:
        """Reads a picture for ``run``: a file that the GPU decodes, or the pixels of another.

        Raises:
            ImageError: If it cannot be read.
        """
        if self.decoder is not None and (found := jpeg.find(source, self.preprocess)):
            return found
        return self._prepare(self.preprocess, source)

    def resize_by_vectors(self) -> None:
        """Has ``read`` resize as runtime/resample.py does, which takes up to a second to import."""
        from maxvision.runtime import resample

        self._prepare = resample.prepare

    def run(
        self, pictures: Sequence[Picture], sources: Sequence[Source]
    ) -> list[np.ndarray | ImageError]:
        """Computes the logits of what ``read`` gives; any thread may call.

        Args:
            pictures: At least one.
            sources: What they were read from. One that the GPU cannot decode is read again, on the
                CPU.

        Returns:
            The logits [classes] of each; the error of one that cannot be read.
        """
        if self.decoder is None:
            return list(self(np.stack(pictures)))  # type: ignore[arg-type]
        answers: list[np.ndarray | ImageError] = []
        errors: dict[int, ImageError] = {}
        with self.decoder(pictures) as batch:
            for i in batch.refused:
                try:
                    batch.replace(i, self.preprocess(sources[i]))
                except ImageError as error:
                    errors[i] = error
                    batch.replace(i, None)
            rows = iter(self(batch) if len(batch) else ())
        for i in range(len(pictures)):
            answers.append(errors[i] if i in errors else next(rows))
        return answers

    def predictions(self, logits: np.ndarray, top_k: int = 5) -> list[list[Prediction]]:
        """Names the likeliest classes of each row of logits, with their softmax.

        Raises:
            ArgumentError: If ``top_k`` is below 1.
        """
        if top_k < 1:
            raise ArgumentError(f"top_k must be at least 1 but is {top_k}")
        scores = softmax(logits)
        order = likeliest(scores, top_k)
        best = np.take_along_axis(scores, order, 1)
        pairs = zip(order.ravel().tolist(), best.ravel().tolist(), strict=True)
        found = [Prediction(self.labels[i], i, score) for i, score in pairs]
        width = order.shape[1]
        return [found[start : start + width] for start in range(0, len(found), width)]

    def compile(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles for the images that ``preprocess`` makes, or takes the result from the cache.

        A model of other than three channels takes no pictures: it compiles at its first call.
        """
        if self.channels == len(self.preprocess.mean):
            self.executor(progress=progress)

    def prepare(self, batch: int) -> None:
        """Makes ready, on a GPU, for batches of up to ``batch`` images that ``preprocess`` makes.

        Sizes are captured (``Replays.prepare``), so that no batch to come waits.
        """
        self.executor().prepare(np.zeros((batch, *self._size, self.channels), np.uint8))
        if self.decoder is not None:
            self.decoder.warm(batch)

    def choose_decoder(self, decode: str, resample: bytes | None = None) -> None:
        """Chooses where JPEGs are decoded, for ``read`` and ``run``.

        Args:
            decode: As ``load`` takes it.
            resample: What ``nvjpeg.graph`` compiles to for this model; compiled if None, where no
                package has it.

        Raises:
            DeviceError: If it is ``gpu`` and cannot be, or the decoder does not start.
        """
        self.preprocess = replace(self.preprocess, fast=decode == "fast")
        self.decoder = None
        if not nvjpeg.chosen(decode, self.device, self._device.api, self.preprocess):
            return
        build = partial(nvjpeg.graph, DeviceRef.from_device(self._device), max(self._size))
        if resample is None and isinstance(self._source, Package):
            resample = self._source.resample()
        executable = (
            initialised(resample, self._device) if resample else load_ops(build, self._device)
        )
        self.decoder = Decoder(self._device, self.preprocess, executable)

    def executable(self) -> Executable:
        """Gives the compiled graph for the images that ``preprocess`` makes: uint8 to logits."""
        return self.executor().executable

    @property
    def place(self) -> Device:
        """The device itself, whose queue its graphs run in."""
        return self._device

    @property
    def sparse(self) -> Chosen:
        """Says which layers run as sparse convolutions on images that ``preprocess`` makes."""
        if isinstance(self._source, Package):
            return self._source.sparse
        return self._choose(self._size).short

    @property
    def formats(self) -> dict[str, str]:
        """Gives the format (graphs/formats.py) of each layer that ``sparse`` names.

        Raises:
            ModelError: If the model was compiled ahead of time, which keeps the names alone.
        """
        if isinstance(self._source, Package):
            raise ModelError(
                f"{self.name}: a model that was compiled ahead of time does not know formats"
            )
        return self._choose(self._size).formats

    def program(self, *, everything: bool = False) -> Program:
        """Gives the network as it runs on the images that ``preprocess`` makes."""
        return self.executor(everything=everything).program

    @property
    def in_bytes(self) -> str:
        """How many layers multiply 8-bit integers, and by what; nothing if there are none."""
        return Target.of(self._device).told_bytes(self.program().in_bytes)

    def executor(
        self,
        size: tuple[int, int] | None = None,
        pixels: str = "uint8",
        *,
        everything: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> Executor:
        """Gives what runs images of a size, px, of a dtype; it is compiled at its first use."""
        key = Key(size or self._size, pixels, everything)
        with self._lock:
            if key not in self._executors:
                self._executors[key] = self._make(key, progress)
            return self._executors[key]

    def adopt(
        self, path: str | os.PathLike[str], pixels: str = "uint8", everything: bool = False
    ) -> None:
        """Takes the graph for images of ``preprocess``'s size from a file, compiling nothing.

        Args:
            path: What ``CompiledModel.export_mef`` wrote of this architecture and dtype, compiled
                for this device (``maxvision bench compile``).
            pixels: What the network was given for that file; so is the next.
            everything: Whether it gives features and stages.

        Raises:
            ModelError: If the file cannot be read.
        """
        key = Key(self._size, pixels, everything)
        program, lowering = self._network(key)
        given = program, self._weights, self._device, lowering
        executor = Executor.adopt(path, *given, self._images(key))
        with self._lock:
            self._executors[key] = executor

    @property
    def _size(self) -> tuple[int, int]:
        return self.preprocess.height, self.preprocess.width

    @property
    def _weights(self) -> Mapping[str, np.ndarray]:
        assert not isinstance(self._source, Package)
        return weights_of(self._source)

    def _choose(self, size: tuple[int, int]) -> Choice:
        assert not isinstance(self._source, Package)
        if size not in self._choices:
            self._choices[size] = choose_sparse(
                self._source,
                self._sparse,
                Target.of(self._device),
                DType[self.dtype],
                size,
                self._asked,
                tf32=self.tf32,
            )
        return self._choices[size]

    def _images(self, key: Key) -> int:
        return 0 if key.everything else IMAGES  # stages are for looking into, once

    def _network(self, key: Key) -> tuple[Program, Lowering]:
        assert not isinstance(self._source, Package)
        program = network(
            self._source, key.size, self.dtype, pixels=key.pixels, everything=key.everything
        )
        return program, Lowering(self.dtype, self.tf32, self._choose(key.size).formats, self._off)

    def _make(self, key: Key, progress: Callable[[str], None] | None) -> Executor:
        if isinstance(self._source, Package):
            if key != Key(self._size, "uint8", False):
                height, width = self._size
                raise ArgumentError(
                    f"{self.name} was compiled for the logits of uint8 pixels [N, {height},"
                    f" {width}, {self.channels}] and nothing else; load the model that it was"
                    " compiled from"
                )
            self._watch.lap("graph")
            mef, registry = self._source.load(self._device)
            executor = Executor(mef, registry, self._device, self._source.program)
            self._watch.lap("load")
            return executor

        def starting() -> None:
            if progress:
                progress(
                    f"compiling {self.name} for {self.device}, this time only; it may take a minute"
                )

        program, lowering = self._network(key)
        return Executor.compile(
            program,
            self._weights,
            self._device,
            lowering,
            images=self._images(key),
            watch=self._watch,
            starting=starting,
        )

    def _run(self, pixels: np.ndarray | Batch, everything: bool) -> list[np.ndarray]:
        if not isinstance(pixels, Batch):
            pixels = np.asarray(pixels)
        if len(pixels.shape) != 4 or pixels.shape[3] != self.channels:
            raise ArgumentError(
                f"pixels must have the shape [N, H, W, {self.channels}] but have"
                f" {list(pixels.shape)}"
            )
        if pixels.dtype not in (np.uint8, np.float32):
            raise ArgumentError(f"pixels must be uint8 or float32 but are {pixels.dtype}")
        _, height, width, _ = pixels.shape
        executor = self.executor((height, width), pixels.dtype.name, everything=everything)
        return executor(pixels)
