"""Build, compile and run: a checkpoint becomes a ``Model``.

    model = load("microsoft/resnet-50", device="gpu")
    model.classify("cat.jpg", top_k=5)

The compiled graph holds no weights, so a second checkpoint of the same architecture, and the
second start of the same model, find it in a cache (runtime/cache.py).
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from max.driver import CPU, Accelerator, Device, accelerator_count
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, read
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, KernelLibrary, TensorType

from maxvision.common.errors import ArgumentError, DeviceError, ImageError, ModelError
from maxvision.graphs import formats, networks, nodes, sparsity
from maxvision.graphs.convolution import Convolution
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.sparsity import Choice, Chosen
from maxvision.graphs.target import Target
from maxvision.runtime import artifact as package
from maxvision.runtime import cache
from maxvision.runtime.artifact import Package
from maxvision.runtime.predictions import Prediction, softmax
from maxvision.runtime.preprocess import Preprocess, Source, load_batch
from maxvision.runtime.replay import Replays

if TYPE_CHECKING:
    from maxvision.weights import Checkpoint

DTYPES = {
    "float32": DType.float32,
    "bfloat16": DType.bfloat16,
    "float16": DType.float16,
}


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


def load(
    source: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tf32: bool = True,
    sparse: str = "auto",
    batch_size: int | None = None,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Model:
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
        progress: Called with a sentence before each step that takes time.

    Raises:
        ModelError: If the model cannot be found, read or run.
        DeviceError: If the device or the dtype is not to be had.
        ArgumentError: If an argument is none of the above.
    """
    if batch_size is not None and batch_size < 1:
        raise ArgumentError(f"batch_size expects a number of at least 1 but is {batch_size}")
    sparsity.check_mode(sparse)  # before anything that takes long
    if package.is_here(source):
        return _unpack(source, device, dtype, batch_size, tf32, sparse)
    from maxvision import weights

    place = find_device(device)
    kind = find_dtype(dtype, place)
    watch = Watch()
    checkpoint = weights.load(source, revision=revision, progress=progress)
    watch.lap("weights")
    model = Model(checkpoint, place, kind, batch_size, watch, tf32=tf32, sparse=sparse)
    model.compile(progress)
    return model


def _unpack(
    source: str, device: str, dtype: str, batch_size: int | None, tf32: bool, sparse: str
) -> Model:
    """Loads a model that was compiled ahead of time."""
    watch = Watch()
    packed = package.read(source)
    watch.lap("weights")
    kind, index = _parse_device(device)
    if kind not in ("auto", "cpu" if packed.target.api == "cpu" else "gpu"):
        raise DeviceError(
            f"{packed.name}: was compiled for {packed.target.name} but device is {device};"
            " leave --device out or compile it for that device"
        )
    if dtype not in ("auto", packed.dtype):
        raise DeviceError(
            f"{packed.name}: was compiled in {packed.dtype} but dtype is {dtype};"
            " leave --dtype out or compile it in that dtype"
        )
    if packed.tf32 and not tf32:
        raise DeviceError(
            f"{packed.name}: was compiled to round float32 to TF32; compile it with --no-tf32"
        )
    if sparse not in ("auto", packed.sparse.mode):
        raise DeviceError(
            f"{packed.name}: was compiled with sparse {packed.sparse.mode} but sparse is {sparse};"
            f" leave it out or compile with --sparse {sparse}"
        )
    place = packed.target.open(index)
    model = Model(packed, place, DTYPES[packed.dtype], batch_size, watch, tf32=packed.tf32)
    model.compile()
    return model


def find_device(name: str) -> Device:
    """Opens the device called ``auto``, ``cpu``, ``gpu`` or ``gpu:N``.

    Raises:
        ArgumentError: If it is none of these.
        DeviceError: If there is no such GPU.
    """
    kind, index = _parse_device(name)
    count = accelerator_count()
    if kind == "cpu" or (kind == "auto" and count == 0):
        return CPU()
    if count == 0:
        raise DeviceError(
            "device gpu expects a GPU that MAX supports but this machine shows none;"
            " use cpu, or check the driver with nvidia-smi or rocm-smi"
        )
    if (index or 0) >= count:
        raise DeviceError(
            f"device {name} expects more than {index} GPUs but this machine has {count};"
            f" use gpu:0 to gpu:{count - 1}"
        )
    return Accelerator(index or 0)


def _parse_device(name: str) -> tuple[str, int | None]:
    kind, colon, index = name.partition(":")
    if kind not in ("auto", "cpu", "gpu") or (colon and (kind != "gpu" or not index.isdecimal())):
        raise ArgumentError(f"device expects auto, cpu, gpu or gpu:N but is {name!r}")
    return kind, int(index) if index else None


def find_dtype(name: str, device: Device) -> DType:
    """Looks up the dtype called ``auto``, ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        ArgumentError: If it is none of these.
        DeviceError: If the device's kernels do not take it.
    """
    if name == "auto":
        return DType.float32
    if name not in DTYPES:
        raise ArgumentError(f"dtype expects auto, {', '.join(DTYPES)} but is {name!r}")
    if not nodes.supported(DTYPES[name], DeviceRef.from_device(device)):
        raise DeviceError(f"dtype {name} runs on a GPU only; use float32 or bfloat16 on a CPU")
    return DTYPES[name]


def build(
    checkpoint: Checkpoint,
    device: DeviceRef,
    dtype: DType,
    *,
    size: tuple[int, int],
    pixels: DType = DType.uint8,
    everything: bool = False,
    tf32: bool = True,
    sparse: Collection[str] | Mapping[str, str] = (),
    kernels: KernelLibrary | None = None,
) -> tuple[Graph, Parameters]:
    """Builds the graph of a checkpoint's network for images of one size, any batch.

    Args:
        checkpoint: The model.
        device: Where the graph runs.
        dtype: Of activations and filters.
        size: Height and width in px.
        pixels: uint8 levels, which the graph normalises, or float32, normalised already.
        everything: Give features and stages beside the logits.
        tf32: Whether products of float32 may be rounded to TF32 on a GPU.
        sparse: The layers that run as sparse convolutions, and perhaps the format of each; see
            ``choose_sparse``.
        kernels: The ops; maxvision's own, compiled if need be, if None.

    Returns:
        The graph, and the weights that it asks for.
    """
    spec = checkpoint.spec
    preprocess = Preprocess.from_config(checkpoint.preprocess)
    if pixels == DType.uint8 and spec.channels != len(preprocess.mean):
        raise ModelError(
            f"{checkpoint.name}: pictures have {len(preprocess.mean)} channels but the model takes"
            f" {spec.channels}; give it float32 pixels that are normalised already"
        )
    levels: dict[str, np.ndarray] = {
        "pixels.mean": np.array(preprocess.mean, np.float32),
        "pixels.scale": 1 / np.array(preprocess.std, np.float32),
    }
    shapes = {**networks.parameters(spec), **{name: levels[name].shape for name in levels}}
    tensors: Mapping[str, np.ndarray] = ChainMap(levels, checkpoint.tensors)  # type: ignore[arg-type]
    parameters = Parameters(tensors, device, dtype, shapes=shapes, tf32=tf32, sparse=sparse)
    image = TensorType(pixels, ["batch", *size, spec.channels], device=device)
    extensions = [] if kernels else [cache.library(gpu=device.is_gpu())]
    with Graph(
        checkpoint.family,
        input_types=[image],
        custom_extensions=extensions,
        kernel_library=kernels,
    ) as graph:
        outputs = networks.network(spec, graph.inputs[0].tensor, parameters)
        ends = [outputs.logits]
        if everything:
            ends += [outputs.features, *outputs.stages]
        graph.output(*ends)
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
    layers = networks.convolutions(checkpoint.spec, size)
    zeros = {each.name: checkpoint.zeros(each.name) for each in layers}

    def formats_of(layer: Convolution) -> tuple[str, ...]:
        shape = (layer.kernel, layer.kernel, layer.channels // layer.groups, layer.filters)
        filters = checkpoint.filter(layer.name).reshape(shape)
        return formats.suited(filters, layer.groups, target, dtype)

    return sparsity.choose(
        checkpoint.name,
        layers,
        zeros,
        mode,
        target,
        dtype,
        tf32=tf32,
        formats_of=formats_of,
        batch=batch,
    )


class Watch:
    """Adds up the seconds of steps that follow one another.

    Attributes:
        seconds: Of each step, in the order of their first ends.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Gives the time since the last call, or since the beginning, to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class Unchecked(KernelLibrary):
    """Takes every op on trust: for a graph that is built for the names of its weights alone."""

    def verify_custom_op(self, custom_op: Any) -> None:
        """Does nothing."""


class Model:
    """A classifier on a device.

    Attributes:
        name: What it was loaded as.
        family: ``resnet`` or ``cvt``.
        spec: The network's shape.
        device: ``cpu`` or ``gpu:N``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        tf32: Whether products of float32 are rounded to TF32 first.
        labels: A name for each class.
        preprocess: Turns an image into the pixels that the model takes.
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
    ) -> None:
        self.name = source.name
        self.family = source.family
        self.device = "cpu" if device.is_host else f"gpu:{device.id}"
        self.dtype = dtype.name
        self.tf32 = tf32 and dtype == DType.float32 and device.api == "cuda"
        self.labels = source.labels
        self.preprocess = Preprocess.from_config(source.preprocess)
        self._asked = batch_size
        self.batch_size = batch_size or (8 if device.is_host else 32)
        self.spec = source.spec
        self._source = source
        self._sparse = sparse
        self._choices: dict[tuple[int, int], Choice] = {}
        self._device = device
        self._dtype = dtype
        self._session = InferenceSession(devices=[device])
        self._executables: dict[tuple[Any, ...], Executable] = {}
        self._replays: dict[tuple[Any, ...], Replays] = {}
        self._lock = threading.Lock()
        self._watch = watch or Watch()
        self.seconds = self._watch.seconds

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Computes the logits [N, classes] of pixels [N, H, W, C]; any thread may call.

        On a GPU a batch size is captured when it comes for the second time (runtime/replay.py), or
        by ``prepare``.

        Args:
            pixels: uint8 levels as ``preprocess`` gives them, or float32 that are normalised
                already. Another size than the preprocessing's compiles once more.

        Raises:
            ArgumentError: If shape or dtype do not fit.
        """
        return self._run(pixels, everything=False)[0]

    def features(self, pixels: np.ndarray) -> Features:
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

    def classify(self, images: Any, top_k: int = 5) -> Any:
        """Classifies an image, or a list of images.

        Args:
            images: A path, bytes, a file, a PIL image or an array; or a list of them.
            top_k: Classes to name, the likeliest first.

        Returns:
            The predictions of the image; of a list, one such list an image.

        Raises:
            ImageError: If an image cannot be read.
            ArgumentError: If ``top_k`` is below 1.
        """
        if top_k < 1:
            raise ArgumentError(f"top_k expects a number of at least 1 but is {top_k}")
        several = isinstance(images, list)
        sources: list[Source] = images if several else [images]
        answers: list[list[Prediction]] = []
        for start in range(0, len(sources), self.batch_size):
            pixels = []
            for item in load_batch(sources[start : start + self.batch_size], self.preprocess):
                if isinstance(item, ImageError):
                    raise item
                pixels.append(item)
            answers += self.predictions(self(np.stack(pixels)), top_k)
        return answers if several else answers[0]

    def predictions(self, logits: np.ndarray, top_k: int = 5) -> list[list[Prediction]]:
        """Names the likeliest classes of each row of logits, with their softmax.

        Raises:
            ArgumentError: If ``top_k`` is below 1.
        """
        if top_k < 1:
            raise ArgumentError(f"top_k expects a number of at least 1 but is {top_k}")
        scores = softmax(logits)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        return [
            [Prediction(self.labels[i], int(i), float(row[i])) for i in best]
            for row, best in zip(scores, order, strict=True)
        ]

    def compile(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles for the images that ``preprocess`` makes, or takes the result from the cache.

        A model of other than three channels takes no pictures: it compiles at its first call.
        """
        if self.spec.channels != len(self.preprocess.mean):
            return
        self._executable(*self._usual, progress)

    def prepare(self, batch: int) -> None:
        """Makes ready, on a GPU, for batches of up to ``batch`` images that ``preprocess`` makes.

        Sizes are captured (``graphs.replay.Replays.prepare``), so that no batch to come waits.
        """
        size, _, _ = self._usual
        pixels = np.zeros((batch, *size, self.spec.channels), np.uint8)
        self._replayed(*self._usual).prepare(pixels)

    def executable(self) -> Executable:
        """Gives the compiled graph for the images that ``preprocess`` makes: uint8 to logits."""
        return self._executable(*self._usual)

    @property
    def sparse(self) -> Chosen:
        """Says which layers run as sparse convolutions on images that ``preprocess`` makes."""
        if isinstance(self._source, Package):
            return self._source.sparse
        return self._choose(self._usual[0]).short

    @property
    def formats(self) -> dict[str, str]:
        """Gives the format (graphs/formats.py) of each layer that ``sparse`` names.

        Raises:
            ModelError: If the model was compiled ahead of time, which keeps the names alone.
        """
        if isinstance(self._source, Package):
            raise ModelError(f"{self.name}: formats expects a checkpoint but this is compiled")
        return self._choose(self._usual[0]).formats

    def _choose(self, size: tuple[int, int]) -> Choice:
        assert not isinstance(self._source, Package)
        if size not in self._choices:
            target = Target.of(self._device)
            self._choices[size] = choose_sparse(
                self._source,
                self._sparse,
                target,
                self._dtype,
                size,
                self._asked,
                tf32=self.tf32,
            )
        return self._choices[size]

    @property
    def _usual(self) -> tuple[tuple[int, int], DType, bool]:
        return (self.preprocess.height, self.preprocess.width), DType.uint8, False

    def adopt(
        self,
        path: str | os.PathLike[str],
        pixels: DType = DType.uint8,
        everything: bool = False,
    ) -> None:
        """Takes the graph for images of ``preprocess``'s size from a file, compiling nothing.

        Args:
            path: What ``CompiledModel.export_mef`` wrote of this architecture and dtype, compiled
                for this device (``maxvision bench compile``).
            pixels: What ``build`` was given for that file; so is the next.
            everything: Whether it gives features and stages.

        Raises:
            ModelError: If the file cannot be read.
        """
        size, _, _ = self._usual
        _, parameters = self._build(size, pixels, everything, Unchecked())
        try:
            compiled = read(path)
        except RuntimeError as problem:
            raise ModelError(f"{path}: expected a compiled graph; {problem}") from problem
        registry = parameters.registry(self._device)
        executable = self._session.init(compiled, weights_registry=registry)
        with self._lock:
            self._executables[(*size, pixels, everything)] = executable

    def _run(self, pixels: np.ndarray, everything: bool) -> list[np.ndarray]:
        channels = self.spec.channels
        pixels = np.asarray(pixels)
        if pixels.ndim != 4 or pixels.shape[3] != channels:
            raise ArgumentError(
                f"pixels expect the shape [N, H, W, {channels}] but have {list(pixels.shape)}"
            )
        if pixels.dtype not in (np.uint8, np.float32):
            raise ArgumentError(f"pixels expect uint8 or float32 but are {pixels.dtype}")
        kind = DType.uint8 if pixels.dtype == np.uint8 else DType.float32
        return self._replayed(pixels.shape[1:3], kind, everything)(pixels)

    def _replayed(self, size: Sequence[int], pixels: DType, everything: bool) -> Replays:
        key = (*size, pixels, everything)
        executable = self._executable(size, pixels, everything)
        with self._lock:
            if key not in self._replays:
                limit = {"images": 0} if everything else {}  # stages are for looking into, once
                self._replays[key] = Replays(executable, self._device, **limit)
            return self._replays[key]

    def _executable(
        self,
        size: Sequence[int],
        pixels: DType,
        everything: bool,
        progress: Callable[[str], None] | None = None,
    ) -> Executable:
        key = (*size, pixels, everything)
        with self._lock:
            if key not in self._executables:
                self._executables[key] = self._make(size, pixels, everything, progress)
            return self._executables[key]

    def _make(
        self,
        size: Sequence[int],
        pixels: DType,
        everything: bool,
        progress: Callable[[str], None] | None,
    ) -> Executable:
        if isinstance(self._source, Package):
            if (tuple(size), pixels, everything) != self._usual:
                height, width = self._usual[0]
                raise ArgumentError(
                    f"{self.name}: was compiled for the logits of uint8 pixels [N, {height},"
                    f" {width}, {self.spec.channels}] and nothing else; load the model that it was"
                    " compiled from"
                )
            self._watch.lap("graph")
            mef, registry = self._source.load(self._device)
        else:
            graph, parameters = self._build(size, pixels, everything, Unchecked())

            def compile() -> CompiledModel:
                self._watch.lap("graph")
                if progress:
                    progress(f"compiling {self.name} for {self.device}, once")
                checked, _ = self._build(size, pixels, everything)
                compiled = self._session.compile(checked)
                self._watch.lap("compile")
                return compiled

            mef = cache.compiled(graph, Target.of(self._device), compile)
            self._watch.lap("graph")
            registry = parameters.registry(self._device)
        executable = self._session.init(read(io.BytesIO(mef)), weights_registry=registry)
        self._watch.lap("load")
        return executable

    def _build(
        self,
        size: Sequence[int],
        pixels: DType,
        everything: bool = False,
        kernels: KernelLibrary | None = None,
    ) -> tuple[Graph, Parameters]:
        assert not isinstance(self._source, Package)
        height, width = size
        return build(
            self._source,
            DeviceRef.from_device(self._device),
            self._dtype,
            size=(height, width),
            pixels=pixels,
            everything=everything,
            tf32=self.tf32,
            sparse=self._choose((height, width)).formats,
            kernels=kernels,
        )
