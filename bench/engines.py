"""Ours and the peers, behind one interface: a model of one dtype at one batch size.

On a CPU the peers are torch, ONNX Runtime and OpenVINO, all with as many threads as torch takes. Of
a quantised model these two run the same integers, from an ONNX file; torch rounds in floats.

Every engine takes its batches from rings of different random inputs (bench/inputs.py): one on the
device, larger than twice its L2 cache, from which each run's input is copied just before it, and
one in pinned host memory, for the uploads. The engines of one cell see the same inputs.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._inductor.config
import torch._inductor.cudagraph_trees
from max.driver import Buffer, Device

from maxvision.bench.inputs import Inputs
from maxvision.bench.onnx_files import Logits, is_quantised, write
from maxvision.bench.ours import HOST_RING, Engine, Maxvision
from maxvision.bench.timing import HostClock, TorchClock
from maxvision.bench.torchnet import TorchNet
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError
from maxvision.runtime.executor import Executor

THROUGH, UNGUARDED = "torch-maxvision", "torch-maxvision-unguarded"
"""Our kernels behind torch.compile; a peer only where it is asked for."""
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def ours(executor: Executor, device: Device, inputs: Inputs) -> Maxvision:
    """Makes our engine, on the same inputs as the peers."""

    def ring() -> list[Buffer]:
        buffers = [Buffer.from_dlpack(each) for each in inputs.host_ring_on_gpu()]
        torch.cuda.synchronize()
        return buffers

    return Maxvision(executor, device, inputs.host, ring)


class Torch(Engine):
    """A torch module, channels_last, from one input tensor that never moves.

    Args:
        name: Of the engine.
        inputs: What it runs on.
        dtype: Of the module.
        prepare: Makes the call to measure of the input.
    """

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        dtype: torch.dtype,
        prepare: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
    ) -> None:
        self.name = name
        self.clock = TorchClock() if inputs.gpu else HostClock()
        self._gpu = inputs.gpu
        self._host = self._pinned = self._ring = [inputs.tensor(i, dtype) for i in range(HOST_RING)]
        self._input = self._staged = self._host[0].clone()  # channels last, as pictures are
        if inputs.gpu:
            self._pinned = [_pinned(x) for x in self._host]
            self._staged = _pinned(self._host[0])
            self._input = self._input.cuda()
            self._ring = inputs.tensor_ring(dtype)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
        self._call = prepare(self._input)
        with torch.inference_mode():
            self._output = self._call()
        self.memory = torch.cuda.max_memory_reserved() - before if inputs.gpu else None
        shape, kind = self._output.shape, self._output.dtype
        self._fetched = torch.empty(shape, dtype=kind, pin_memory=inputs.gpu)

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
        inputs: What it runs on.
        prepare: Makes the call to measure of the input, which never moves.
    """

    def __init__(
        self, name: str, inputs: Inputs, prepare: Callable[[np.ndarray], Callable[[], np.ndarray]]
    ) -> None:
        self.name = name
        self.clock = HostClock()
        tensors = [inputs.tensor(i, torch.float32) for i in range(HOST_RING)]
        self._host = [np.ascontiguousarray(x.numpy()) for x in tensors]
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


def peers(reference: Any, inputs: Inputs, dtype: str) -> dict[str, Callable[[], Engine]]:
    """Says how to make each peer of a model; making one may compile for minutes.

    ``torch-compile`` copies its input at each call, as it must for a user (10 us of ResNet-50's
    time at batch 1 on an H200); ``torch-compile-graph`` is the same code in a graph that reads the
    input in place, which is what ours is compared with most strictly. ``torch-maxvision`` is our
    kernels behind ``torch.compile``, which checks the module before each call (guards);
    ``torch-maxvision-unguarded`` leaves these checks out.
    """
    kind = TORCH[dtype]

    def placed() -> Any:
        module = copy.deepcopy(reference).to(kind)
        module = module.to("cuda" if inputs.gpu else "cpu")
        for each in [*module.parameters(), *module.buffers()]:
            if each.ndim == 4:  # Module.to also takes those of 5 axes, which cannot be so
                each.data = each.data.contiguous(memory_format=torch.channels_last)
        return module

    def made(name: str, prepare: Callable[..., Callable[[], torch.Tensor]], *more: Any) -> Any:
        return lambda: Torch(name, inputs, kind, lambda x: prepare(placed(), x, *more))

    ways: dict[str, Any] = {
        "torch-eager": (_eager,),
        "torch-eager-graph": (_graph,),
        "torch-compile": (_compiled, "reduce-overhead" if inputs.gpu else "default"),
        "torch-compile-graph": (_compiled_graph, "default"),
        "torch-max-autotune": (_compiled, "max-autotune"),
        THROUGH: (_through, "maxvision"),
        UNGUARDED: (_through, "maxvision", torch.compiler.skip_guard_on_all_nn_modules_unsafe),
        "torch-mojo-backend": (_mojo,),
    }
    found = {name: made(name, *way) for name, way in ways.items()}
    for name, prepare in ("onnxruntime", _onnxruntime), ("openvino", _openvino):
        found[name] = functools.partial(
            Runtime, name, inputs, functools.partial(prepare, reference, dtype)
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

    return _through(module, x, mojo_backend)


def _through(
    module: torch.nn.Module, x: torch.Tensor, backend: Any, guards: Any = None
) -> Callable[[], torch.Tensor]:
    options = {"guard_filter_fn": guards} if guards else None
    compiled = torch.compile(
        lambda x: module(x).logits, backend=backend, dynamic=False, options=options
    )
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    return lambda: compiled(x)


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
        write(path, reference, torch.from_numpy(x), every_sum=True)
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})[0]


def _openvino(reference: Any, dtype: str, x: np.ndarray) -> Callable[[], np.ndarray]:
    if dtype not in ("float32", "bfloat16"):
        raise ArgumentError(f"openvino takes float32 or bfloat16 here but dtype is {dtype}")
    runtime = _package("openvino")
    example = torch.from_numpy(x)
    if isinstance(reference, TorchNet) and is_quantised(reference.source.program):
        _package("onnx")  # which torch's exporter needs
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            write(path, reference, example)
            converted = runtime.convert_model(path)
    else:
        module = Logits(reference).eval()
        converted = runtime.convert_model(module, example_input=example, input=[list(x.shape)])
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
