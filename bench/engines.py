"""Ours and the peers, behind one interface: a model of one dtype at one batch size.

On a CPU the peers are torch, ONNX Runtime and OpenVINO, all with as many threads as torch takes.

Every engine takes its batches from rings of different random images: one on the device, larger
than twice its L2 cache, from which each run's input is copied just before it, and one in pinned
host memory, for the uploads. The engines of one cell see the same images. Peers take pixels that
are normalised and in the model's dtype already, ours takes uint8 and normalises in its graph.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.cudagraph_trees
from max.driver import Buffer, Device

from maxvision.bench.ours import HOST_RING, L2_UNKNOWN, Engine, Maxvision, pictures, ring_size
from maxvision.bench.timing import HostClock, TorchClock
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError
from maxvision.runtime.classifier import Classifier
from maxvision.runtime.preprocess import Preprocess

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Images:
    """Random images of one batch size, in every form that an engine wants.

    Attributes:
        batch: Images in a batch.
        size: Height and width, px.
        mean: Of each channel, as levels.
        std: Of each channel, as levels.
        gpu: Whether rings lie on a GPU.
    """

    batch: int
    size: tuple[int, int]
    mean: np.ndarray
    std: np.ndarray
    gpu: bool

    @classmethod
    def of(cls, prepare: Preprocess, batch: int, gpu: bool) -> Images:
        """Makes images of the size and normalisation that ``prepare`` has."""
        mean, std = (np.array(values, np.float32) for values in (prepare.mean, prepare.std))
        return cls(batch, (prepare.height, prepare.width), mean, std, gpu)

    @cached_property
    def host(self) -> list[np.ndarray]:
        """The host's ring: uint8 [N, H, W, C]."""
        return pictures((self.batch, *self.size, len(self.mean)), HOST_RING)

    def count(self, bytes_a_batch: int) -> int:
        """How many batches a ring on the device has: twice its L2 cache, and at least three."""
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or L2_UNKNOWN
        return ring_size(bytes_a_batch, cache)

    def device_levels(self) -> list[torch.Tensor]:
        """A ring on the GPU: uint8 [N, H, W, C]."""
        first = torch.from_numpy(self.host[0])
        count = self.count(first.numel())
        ring = torch.randint(0, 256, (count, *first.shape), dtype=torch.uint8, device="cuda")
        ring[0].copy_(first)
        return list(ring)

    def device_pixels(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """A ring on the GPU: normalised, [N, C, H, W], channels last."""
        first = self.pixels(0, dtype)
        count = self.count(first.numel() * first.element_size())
        n, c, h, w = first.shape
        ring = torch.randn((count, n, h, w, c), device="cuda", dtype=dtype)
        ring[0].copy_(first.permute(0, 2, 3, 1))
        return [each.permute(0, 3, 1, 2) for each in ring]

    def pixels(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """A batch of the host's ring, normalised: [N, C, H, W], channels last."""
        levels = torch.from_numpy(self.host[turn % HOST_RING]).float()
        mean, std = torch.from_numpy(self.mean), torch.from_numpy(self.std)
        return ((levels - mean) / std).to(dtype).permute(0, 3, 1, 2)


def ours(model: Classifier, device: Device, images: Images) -> Maxvision:
    """Makes our engine, on the same pictures as the peers."""

    def ring() -> list[Buffer]:
        buffers = [Buffer.from_dlpack(each) for each in images.device_levels()]
        torch.cuda.synchronize()
        return buffers

    return Maxvision(model.executable(), device, images.host, ring)


class Torch(Engine):
    """A torch module, channels_last, from one input tensor that never moves.

    Args:
        name: Of the engine.
        images: What it runs on.
        dtype: Of the module.
        prepare: Makes the call to measure of the input.
    """

    def __init__(
        self,
        name: str,
        images: Images,
        dtype: torch.dtype,
        prepare: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
    ) -> None:
        self.name = name
        self.clock = TorchClock() if images.gpu else HostClock()
        self._gpu = images.gpu
        self._host = self._pinned = self._ring = [images.pixels(i, dtype) for i in range(HOST_RING)]
        self._input = self._staged = self._host[0].clone(memory_format=torch.channels_last)
        if images.gpu:
            self._pinned = [_pinned(x) for x in self._host]
            self._staged = _pinned(self._host[0])
            self._input = self._input.cuda()
            self._ring = images.device_pixels(dtype)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
        self._call = prepare(self._input)
        with torch.inference_mode():
            self._output = self._call()
        self.memory = torch.cuda.max_memory_reserved() - before if images.gpu else None
        shape, kind = self._output.shape, self._output.dtype
        self._fetched = torch.empty(shape, dtype=kind, pin_memory=images.gpu)

    def feed(self, turn: int) -> None:
        """See ``Engine``."""
        self._input.copy_(self._ring[turn % len(self._ring)])

    def upload(self, turn: int) -> None:
        """See ``Engine``."""
        self._input.copy_(self._pinned[turn % HOST_RING], non_blocking=True)

    @torch.inference_mode()
    def compute(self) -> None:
        """See ``Engine``."""
        self._output = self._call()

    def download(self) -> None:
        """See ``Engine``."""
        self._fetched.copy_(self._output, non_blocking=True)

    def answer(self, turn: int) -> np.ndarray:
        """See ``Engine``."""
        self._staged.copy_(self._host[turn % HOST_RING])
        if self._gpu:
            self._input.copy_(self._staged, non_blocking=True)
        self.compute()
        self.download()
        self.clock.wait()
        return self._fetched.float().numpy().copy()

    def close(self) -> None:
        """See ``Engine``."""
        del self._call, self._output
        torch._dynamo.reset()
        if self._gpu:
            torch._inductor.cudagraph_trees.reset_cudagraph_trees()
            gc.collect()
            torch.cuda.empty_cache()


class Runtime(Engine):
    """A runtime of its own on a CPU: numpy in, numpy out, [N, C, H, W] as it came from torch.

    Args:
        name: Of the engine.
        images: What it runs on.
        prepare: Makes the call to measure of the input, which never moves.
    """

    def __init__(
        self, name: str, images: Images, prepare: Callable[[np.ndarray], Callable[[], np.ndarray]]
    ) -> None:
        self.name = name
        self.clock = HostClock()
        pixels = [images.pixels(i, torch.float32) for i in range(HOST_RING)]
        self._host = [np.ascontiguousarray(x.numpy()) for x in pixels]
        self._input = self._host[0].copy()
        self._call = prepare(self._input)
        self._output = self._call()

    def feed(self, turn: int) -> None:
        """See ``Engine``."""
        np.copyto(self._input, self._host[turn % HOST_RING])

    def compute(self) -> None:
        """See ``Engine``."""
        self._output = self._call()

    def answer(self, turn: int) -> np.ndarray:
        """See ``Engine``."""
        self.feed(turn)
        self.compute()
        return self._output.astype(np.float32)

    def close(self) -> None:
        """See ``Engine``."""
        del self._call


def peers(reference: Any, images: Images, dtype: str) -> dict[str, Callable[[], Engine]]:
    """Says how to make each peer of a model; making one may compile for minutes.

    ``torch-compile`` copies its input at each call, as it must for a user (10 us of ResNet-50's
    time at batch 1 on an H200); ``torch-compile-graph`` is the same code in a graph that reads the
    input in place, which is what ours is compared with most strictly.
    """
    kind = TORCH[dtype]

    def placed() -> Any:
        module = copy.deepcopy(reference).to(kind)
        return module.to("cuda" if images.gpu else "cpu", memory_format=torch.channels_last)

    def made(name: str, prepare: Callable[..., Callable[[], torch.Tensor]], *more: Any) -> Any:
        return lambda: Torch(name, images, kind, lambda x: prepare(placed(), x, *more))

    ways: dict[str, Any] = {
        "torch-eager": (_eager,),
        "torch-eager-graph": (_graph,),
        "torch-compile": (_compiled, "reduce-overhead" if images.gpu else "default"),
        "torch-compile-graph": (_compiled_graph, "default"),
        "torch-max-autotune": (_compiled, "max-autotune"),
        "torch-mojo-backend": (_mojo,),
    }
    found = {name: made(name, *way) for name, way in ways.items()}
    for name, prepare in ("onnxruntime", _onnxruntime), ("openvino", _openvino):
        found[name] = functools.partial(
            Runtime, name, images, functools.partial(prepare, reference, dtype)
        )
    return found


def peer_names(gpu: bool, autotune: bool = False) -> list[str]:
    """Names the peers that are at hand."""
    if not gpu:
        return ["torch-eager", "torch-compile", "onnxruntime", "openvino"]
    names = ["torch-eager-graph", "torch-compile", "torch-compile-graph"]
    if autotune:
        names.append("torch-max-autotune")
    if importlib.util.find_spec("torch_mojo_backend"):
        names.append("torch-mojo-backend")
    return names


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, pin_memory=True).copy_(x)


def _eager(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: module(x).logits


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Captures a call in a CUDA graph of its own.

    cuBLAS's workspace has to come from the graph's own pool: torch.compile drops the shared one,
    and a graph that was captured with it would go on writing there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            output = call()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(kept: Any = call) -> Any:  # the graph itself keeps no weight alive
        captured.replay()
        return output

    return replay


def _graph(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    torch.backends.cudnn.benchmark = True
    return captured(_eager(module, x))


def _compiled(module: torch.nn.Module, x: torch.Tensor, mode: str) -> Callable[[], torch.Tensor]:
    torch._dynamo.reset()
    torch._inductor.config.freezing = True  # folds the batch norms, lays filters out anew
    torch.backends.cudnn.benchmark = True
    # The input is not marked as static, which would spare a copy of it: freezing then takes it for
    # a constant and folds the whole network away.
    compiled = torch.compile(lambda x: module(x).logits, mode=mode, dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    return lambda: compiled(x)


def _compiled_graph(module: torch.nn.Module, x: torch.Tensor, mode: str) -> Any:
    return captured(_compiled(module, x, mode))


def _mojo(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    from torch_mojo_backend import mojo_backend

    compiled = torch.compile(lambda x: module(x).logits, backend=mojo_backend, dynamic=False)
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    return lambda: compiled(x)


class _Logits(torch.nn.Module):
    """A network that gives its logits alone, as an exporter wants it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        """Computes the logits of x[N, C, H, W]."""
        return self.module(x).logits


def _onnxruntime(reference: Any, dtype: str, x: np.ndarray) -> Callable[[], np.ndarray]:
    if dtype != "float32":
        raise ArgumentError(f"onnxruntime computes in float32 on a CPU but dtype is {dtype}")
    runtime = _package("onnxruntime")
    _package("onnx")  # which torch's exporter needs
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(
            _Logits(reference).eval(),
            (torch.from_numpy(x),),
            path,
            dynamo=False,  # the exporter that needs no further package
            input_names=["x"],
            output_names=["logits"],
        )
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})[0]


def _openvino(reference: Any, dtype: str, x: np.ndarray) -> Callable[[], np.ndarray]:
    if dtype not in ("float32", "bfloat16"):
        raise ArgumentError(f"openvino takes float32 or bfloat16 here but dtype is {dtype}")
    runtime = _package("openvino")
    module = _Logits(reference).eval()
    converted = runtime.convert_model(
        module, example_input=torch.from_numpy(x), input=[list(x.shape)]
    )
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
    }
    request = runtime.compile_model(converted, "CPU", settings).create_infer_request()
    request.set_input_tensor(runtime.Tensor(x, shared_memory=True))

    def run() -> np.ndarray:
        request.infer()
        return np.asarray(request.get_output_tensor(0).data)

    return run


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ArgumentError(f"this engine needs the package {name}; {way_to('peers')}") from None
