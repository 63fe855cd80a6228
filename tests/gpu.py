"""The op and model tests on a GPU: ``python -m tests.gpu --json FILE``.

Needs a GPU, torch with CUDA and transformers. Every op of tests/ops/cases.py, and ResNet-18,
ResNet-50 and CvT-13 of random weights, at float32 (by TF32, and exact), bfloat16 and float16,
against torch in float64; the bundled models on examples/; graph capture; and the time of a batch
beside torch's (eager, channels_last, in a CUDA graph). Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef

from bench.environment import environment
from bench.references import our_model, reference_model
from bench.tf32 import RoundedProducts, allow_tf32
from graphs.replay import Execution
from graphs.session import Model, load
from tests.ops.cases import CASES, TORCH, build_graph, check

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (1, 3)
TIMED = (1, 32, 256)
MODELS = ("resnet-18", "resnet-50", "cvt-13")
PRECISIONS = (
    (DType.float32, True),
    (DType.float32, False),
    (DType.bfloat16, False),
    (DType.float16, False),
)
"""Dtypes, and whether products are rounded to TF32."""


def main() -> int:
    """Runs everything and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    allow_tf32(False)
    steps: list[Callable[[], Iterator[dict[str, Any]]]] = [ops, models, bundled]
    records = []
    start = time.perf_counter()
    compile_everything()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for record in itertools.chain.from_iterable(step() for step in steps):
        records.append(record)
        if not record["passed"] or "model" in record:
            print(json.dumps(record), flush=True)
        if "case" not in record:
            write(options.json, records)
    failed = sum(not record["passed"] for record in records)
    write(options.json, records)
    print(f"{len(records) - failed} passed, {failed} failed")
    return 1 if failed else 0


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes the records so far, a line each."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f'{{"environment": {json.dumps(environment())},\n"records": [\n{lines}\n]}}\n')


def ops() -> Iterator[dict[str, Any]]:
    """Compares every case of tests/ops/cases.py with torch, and a replay with its run."""
    device = Accelerator()
    for dtype, tf32 in PRECISIONS:
        graph, parameters = build_graph(CASES, DeviceRef.GPU(), dtype, tf32=tf32)
        session = InferenceSession(devices=[device])
        registry = {k: v for w in parameters for k, v in w.registry(device).items()}
        executable = session.init(session.compile(graph), weights_registry=registry)
        for batch in BATCHES:
            arrays = itertools.chain.from_iterable(case.data(batch)[0] for case in CASES)
            inputs = [
                Buffer.from_dlpack(
                    torch.from_numpy(a).to("cuda", None if a.dtype == np.uint8 else TORCH[dtype])
                )
                for a in arrays
            ]
            torch.cuda.synchronize()
            outputs = [torch.from_dlpack(y) for y in executable.execute(*inputs)]
            for case, output in zip(CASES, outputs, strict=True):
                record = {"case": case.name, "dtype": dtype.name, "tf32": tf32, "batch": batch}
                try:
                    error = check(case, output, batch, TORCH[dtype], "cuda", tf32=tf32)
                    yield {**record, "max_rel_err": error, "passed": True}
                except AssertionError as problem:
                    yield {**record, "passed": False, "why": str(problem)}
            key = batch
            replayed = executable.capture(key, *inputs)
            executable.replay(key, *inputs)
            device.synchronize()
            same = all(
                torch.equal(torch.from_dlpack(a), b) for a, b in zip(replayed, outputs, strict=True)
            )
            yield {
                "case": "capture and replay",
                "dtype": dtype.name,
                "tf32": tf32,
                "batch": batch,
                "passed": same,
            }


def load_random(name: str, dtype: DType, tf32: bool) -> Model:
    """Loads ``reference_model(name)`` through a checkpoint, as a user would."""
    return our_model(name, reference_model(name), Accelerator(), dtype, tf32=tf32)


def compile_everything() -> None:
    """Compiles every graph into MAX's cache, several processes at a time."""
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ops, dtype.name, tf32) for dtype, tf32 in PRECISIONS]
        jobs += [
            pool.submit(compile_model, name, dtype.name, tf32)
            for name, (dtype, tf32) in itertools.product(MODELS, PRECISIONS)
        ]
        for job in jobs:
            job.result()


def compile_ops(dtype: str, tf32: bool) -> None:
    """Compiles the graph of all cases."""
    graph, _ = build_graph(CASES, DeviceRef.GPU(), getattr(DType, dtype), tf32=tf32)
    InferenceSession(devices=[Accelerator()]).compile(graph)


def compile_model(name: str, dtype: str, tf32: bool) -> None:
    """Compiles both graphs of a network."""
    model = load_random(name, getattr(DType, dtype), tf32)
    model.features(np.zeros((1, 224, 224, 3), np.float32))


def models() -> Iterator[dict[str, Any]]:
    """Compares networks of random weights with transformers, stage by stage, and times them."""
    for name, (dtype, tf32) in itertools.product(MODELS, PRECISIONS):
        reference = reference_model(name)
        ours = load_random(name, dtype, tf32)
        what = {"model": name, "dtype": dtype.name, "tf32": tf32}
        yield {**what, **errors(ours, reference, TORCH[dtype])}
        yield {**what, **captured(ours)}
        for batch in TIMED:
            milliseconds, peer = times(ours, reference, TORCH[dtype], batch)
            yield {
                **what,
                "batch": batch,
                "device": ours.device,
                "engine": "maxvision",
                "p50_ms": milliseconds,
                "images_per_s": batch / milliseconds * 1e3,
                "torch_eager_graph_p50_ms": peer,
                "passed": True,
            }
        del ours, reference
        gc.collect()
        torch.cuda.empty_cache()


def errors(ours: Model, reference: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Measures logits and stages against float64; the bound is twice torch's own error.

    The float64 reference starts from the same rounded weights and pixels as torch at ``dtype``;
    of TF32 torch's error is that of rounded operands.
    """
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((BATCHES[-1], 224, 224, 3)).astype(np.float32)
    got = ours.features(pixels)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).cuda()
    truth = everything(reference.double().cuda(), x.double())
    with RoundedProducts() if ours.tf32 else contextlib.nullcontext():
        theirs = everything(reference.to(dtype), x.to(dtype))
    reference.float()
    record: dict[str, Any] = {"passed": True}
    mine = [torch.from_numpy(a) for a in (got.logits, *got.stages)]
    names = ["logits", *(f"stage {i}" for i in range(len(got.stages)))]
    for name, a, b, c in zip(names, mine, theirs, truth, strict=True):
        scale = c.abs().max().item()
        error = (a.cuda().double() - c).abs().max().item() / scale
        bound = 2 * (b.double() - c).abs().max().item() / scale + 8 * torch.finfo(torch.float32).eps
        record[name] = {"max_rel_err": error, "torch_allows": bound}
        record["passed"] &= error <= bound
    return record


def captured(ours: Model, calls: int = 200) -> dict[str, Any]:
    """Calls a model with random batch sizes from four threads; compares with plain execution."""
    rng = np.random.default_rng(0)
    size = (ours.preprocess.height, ours.preprocess.width, 3)
    batches = [rng.integers(0, 256, (n, *size), np.uint8) for n in range(1, 17)]
    alone = []
    for pixels in batches:
        plain = Execution(ours.executable(), ours._device)
        plain.upload(pixels)
        plain.run()
        alone.append(plain.result()[0])
    order = rng.integers(0, len(batches), calls).tolist()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: ours(batches[i]), order))
    same = [np.array_equal(got, alone[i]) for got, i in zip(together, order, strict=True)]
    return {"case": "calls from threads", "calls": calls, "passed": all(same)}


@torch.inference_mode()
def everything(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Runs a transformers model; returns its logits and its stages as [N, P, Q, C]."""
    outputs = model(x, output_hidden_states=True)
    stages = len(getattr(model.config, "depths", getattr(model.config, "depth", ())))
    maps = outputs.hidden_states[-stages:]
    return [outputs.logits, *(m.permute(0, 2, 3, 1) for m in maps)]


def times(
    ours: Model, reference: torch.nn.Module, dtype: torch.dtype, batch: int
) -> tuple[float, float]:
    """Times a batch on the device, replayed: ours and torch's eager graph; medians in ms."""
    executable = ours._executable((224, 224), DType.uint8, False)
    pixels = torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8, device="cuda")
    inputs = Buffer.from_dlpack(pixels)
    executable.execute(inputs)
    executable.capture(batch, inputs)
    device = ours._device

    def replay() -> None:
        executable.replay(batch, inputs)

    mine = median(replay, device.synchronize)
    executable.release_captured_graph(batch)

    allow_tf32(ours.tf32)
    model = reference.to("cuda", dtype, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            model(x)
    theirs = median(captured.replay, torch.cuda.synchronize)
    allow_tf32(False)
    model.float()
    return mine, theirs


def median(step: Callable[[], Any], wait: Callable[[], Any], seconds: float = 0.5) -> float:
    """Times ``step``, each waited for, for about ``seconds``; the median in ms."""
    for _ in range(3):
        step()
    wait()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        step()
        wait()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def bundled() -> Iterator[dict[str, Any]]:
    """Compares the bundled models' answers for examples/ on the GPU with the CPU's."""
    from weights import bundled as names

    pictures = sorted(p for p in (ROOT / "examples").iterdir() if p.suffix in (".jpg", ".png"))
    for name in names():
        expected = load(name, device="cpu").classify(list(pictures), top_k=1)
        for dtype in TORCH:
            got = load(name, device="gpu", dtype=dtype.name).classify(list(pictures), top_k=1)
            labels = [a[0].label == b[0].label for a, b in zip(expected, got, strict=True)]
            difference = max(
                abs(a[0].score - b[0].score) for a, b in zip(expected, got, strict=True)
            )
            yield {
                "model": name,
                "dtype": dtype.name,
                "pictures": len(pictures),
                "largest_score_difference": difference,
                "passed": all(labels),
            }


if __name__ == "__main__":
    sys.exit(main())
