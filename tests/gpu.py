"""The op and model tests on a GPU: ``python -m tests.gpu --json FILE``.

Needs a GPU, torch with CUDA and transformers. Every op of tests/ops/cases.py, and ResNet-18,
ResNet-50 and CvT-13 of random weights, at float32 (by TF32, and exact), bfloat16 and float16,
against torch in float64; the bundled models on examples/ and --photos; graph capture; what
``maxvision time`` measures; pictures that the GPU decodes. Exits with 1 if anything fails. How fast
it is: ``maxvision bench``.

The machine with the GPU needs no compiler: ``python -m tests.gpu --compile sm_90a --compiled DIR``
compiles on any other, and ``--compiled DIR`` takes what it wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.driver import Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, read
from max.engine import Model as Executable
from max.graph import DeviceRef
from PIL import Image

from maxvision.bench import latency
from maxvision.bench.decoding import decoded
from maxvision.bench.environment import environment
from maxvision.bench.records import check_path, write
from maxvision.bench.references import artifact, checkpoint, precision, reference_model
from maxvision.bench.tf32 import RoundedProducts, allow_tf32
from maxvision.bridge.tensors import OnTensors
from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.errors import UserError
from maxvision.common.host import leave
from maxvision.common.pictures import EXTENSIONS
from maxvision.graphs.target import Target, base
from maxvision.runtime import jpeg, nvjpeg
from maxvision.runtime.classifier import Classifier, build, load
from maxvision.runtime.executor import Unchecked
from maxvision.runtime.jpeg import File, Jpeg
from maxvision.runtime.nvjpeg import Decoded
from maxvision.runtime.preprocess import UPRIGHT
from maxvision.runtime.replay import Execution, sizes
from maxvision.weights import bundled as bundled_names
from tests.ops.cases import (
    CASES,
    ON_GPU,
    ON_HOPPER,
    TORCH,
    Case,
    build_graph,
    check,
    draw,
    poisoned,
)
from tests.runtime.standin import Pillow

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (1, 3)
POISONED = 4
"""Images of the batch in which all but the second hold NaN or infinity."""
MANY = 65_600
"""Images of a batch that a grid's second axis does not count."""
COUNTED = ("depthwise_qkv 1 x 1", "depthwise_qkv 2 x 2")
"""The cases that are run with it, each by a kernel that counts images so."""
PARTS = tuple(f"ops-{i}" for i in range(8))
"""The graphs of all other cases: one graph of them compiles for half an hour, on one core."""
MOST = 16
"""Images of the largest batch of the calls from threads."""
MODELS = ("resnet-18", "resnet-50", "cvt-13")
PRECISIONS = {
    "tf32": (DType.float32, True),
    "float32": (DType.float32, False),
    "bfloat16": (DType.bfloat16, False),
    "float16": (DType.float16, False),
}
"""Dtypes, and whether products are rounded to TF32."""
STEPS = ("ops", "models", "bundled", "timed", "decoding")
"""What is run, in this order."""
AGREES = 0.01
"""Levels that a GPU's decoder may differ from libjpeg-turbo's on average, once resized. An H100's
differs by 2 at most, and by less than 0.0001 on average."""
SIZE = (224, 224)
GRAPHS = {"": ("uint8", False), "-stages": ("float32", True)}
"""The graphs of a network: what the pixels are, and whether it gives its stages."""
GRADIENTS = ("conv2d_weight_grad", "attention_grad")
"""Cases that run without NaN and infinity: tensor cores multiply zeros of the padding by them."""


def main() -> int:
    """Runs everything and writes the records, or compiles everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the records go")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="graphs compiled elsewhere")
    parser.add_argument("--compile", metavar="TARGET", help="only compile, into --compiled DIR")
    parser.add_argument("--photos", type=Path, metavar="DIR", help="more pictures to classify")
    parser.add_argument(
        "--precisions",
        type=lambda names: names.split(","),
        default=list(PRECISIONS),
        metavar="A,B",
        help=f"some of {', '.join(PRECISIONS)}",
    )
    parser.add_argument(
        "--steps",
        type=lambda names: names.split(","),
        default=list(STEPS),
        metavar="A,B",
        help=f"some of {', '.join(STEPS)} (default: all, without the last where the extra nvjpeg is"
        " not installed)",
    )
    options = parser.parse_args()
    for name in options.steps:
        if name not in STEPS:
            parser.error(f"--steps takes some of {', '.join(STEPS)}, not {name!r}")
    for name in options.precisions:
        if name not in PRECISIONS:
            parser.error(f"--precisions takes some of {', '.join(PRECISIONS)}, not {name!r}")
    if options.compile:
        if not options.compiled:
            parser.error("--compile needs --compiled DIR")
        target = Target.parse(options.compile)
        compile_everything(options.compiled, target, options.precisions, options.steps)
        return 0
    if not options.json:
        parser.error("name the file to write with --json FILE")
    check_path(options.json)
    allow_tf32(False)
    steps: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "ops": partial(ops, options.compiled, options.precisions),
        "models": partial(models, options.compiled, options.precisions),
        "bundled": partial(bundled, options.compiled, options.photos, options.precisions),
        "timed": partial(timed, options.compiled, options.precisions),
        "decoding": partial(decoding, options.compiled, options.photos, options.precisions),
    }
    if options.steps == list(STEPS) and not nvjpeg.is_installed():
        options.steps.remove("decoding")
        print("NOT RUN: decoding, which needs the extra nvjpeg", flush=True)
    facts = environment()
    records = []
    try:
        for record in itertools.chain.from_iterable(steps[name]() for name in options.steps):
            records.append(record)
            if not record["passed"] or "model" in record:
                print(json.dumps(record), flush=True)
            if "case" not in record:
                write(options.json, facts, records)
    except UserError as error:  # such as a graph that was not compiled
        print(f"error: {error}; what ran before is in {options.json}", flush=True)
        return 2
    failed = sum(not record["passed"] for record in records)
    write(options.json, facts, records)
    print(f"{len(records) - failed} passed, {failed} failed")
    return 1 if failed else 0


def compile_everything(
    folder: Path, target: Target, precisions: list[str], steps: list[str]
) -> None:
    """Compiles the graphs of steps into ``folder``, a process for each two cores."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[Callable[[], None]] = []
    for dtype, tf32 in (PRECISIONS[name] for name in precisions):
        for name in (*PARTS, "counted") if "ops" in steps else ():
            jobs.append(partial(compile_ops, folder, target, name, dtype.name, tf32))
        if "models" in steps:
            jobs += [partial(compile_model, folder, target, m, dtype.name, tf32) for m in MODELS]
    on_gpu = [*bundled_names()] if {"bundled", "timed"} & {*steps} else []
    if "bundled" in steps:
        jobs += [partial(package, folder, name, "cpu:x86-64-v3", "float32") for name in on_gpu]
    if "decoding" in steps:
        on_gpu.append(DEFAULT_MODEL)
    for name in on_gpu:
        jobs += [partial(package, folder, name, target.name, each) for each in packaged(precisions)]
    start = time.perf_counter()
    workers = max(1, (os.cpu_count() or 1) // 2)
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for i, job in enumerate([pool.submit(job) for job in jobs], 1):
            job.result()
            print(f"{i} of {len(jobs)} compiled, {time.perf_counter() - start:.0f} s", flush=True)


def compile_ops(folder: Path, target: Target, name: str, dtype: str, tf32: bool) -> None:
    """Compiles a graph of cases."""
    with target.device() as device:
        place = DeviceRef.from_device(device)
        kind = getattr(DType, dtype)
        graph, _ = build_graph(cases_of(kind, device, name), place, kind, tf32=tf32)
        compiled = InferenceSession(devices=[device]).compile(graph)
        compiled.export_mef(artifact(folder, name, precision(dtype, tf32)))


def compile_model(folder: Path, target: Target, name: str, dtype: str, tf32: bool) -> None:
    """Compiles both graphs of a network."""
    source = checkpoint(name, reference_model(name))
    with target.device() as device:
        session = InferenceSession(devices=[device])
        for suffix, (pixels, everything) in GRAPHS.items():
            graph, _ = build(
                source,
                DeviceRef.from_device(device),
                getattr(DType, dtype),
                size=SIZE,
                pixels=getattr(DType, pixels),
                everything=everything,
                tf32=tf32,
            )
            path = artifact(folder, name, precision(dtype, tf32) + suffix)
            session.compile(graph).export_mef(path)


def packaged(precisions: list[str]) -> list[str]:
    """Lists the dtypes of bundled models on a GPU: TF32 is float32's default."""
    found = dict.fromkeys(PRECISIONS[name][0].name for name in precisions if name != "float32")
    return list(found)


def package(folder: Path, name: str, target: str, dtype: str) -> None:
    """Compiles a bundled model ahead of time."""
    from maxvision.runtime.ahead import compile

    kind = "cpu" if target.startswith("cpu") else "gpu"
    compile(name, folder / f"{name}-{kind}-{dtype}", target=target, dtype=dtype, force=True)


def cases_of(dtype: DType, device: Device, name: str) -> list[Case]:
    """Lists the cases of a graph, one of ``PARTS`` or ``counted``, that a GPU runs at a dtype."""
    if name == "counted":
        return [case for case in CASES if case.name in COUNTED]
    hopper = base(device.architecture_name) == "sm_90"
    cases = CASES + ON_GPU + (ON_HOPPER if hopper and dtype != DType.float32 else [])
    return cases[PARTS.index(name) :: len(PARTS)]


def load_cases(
    device: Device, dtype: DType, tf32: bool, folder: Path | None, name: str
) -> tuple[list[Case], Executable]:
    """Loads a graph of cases, or compiles it where there is no ``folder``."""
    cases = cases_of(dtype, device, name)
    kernels = Unchecked() if folder else None
    graph, parameters = build_graph(cases, DeviceRef.GPU(), dtype, tf32=tf32, kernels=kernels)
    session = InferenceSession(devices=[device])
    path = folder and artifact(folder, name, precision(dtype.name, tf32))
    registry = {k: v for w in parameters for k, v in w.registry(device).items()}
    compiled = read(path) if path else session.compile(graph)
    return cases, session.init(compiled, weights_registry=registry)


def ops(folder: Path | None, precisions: list[str]) -> Iterator[dict[str, Any]]:
    """Compares every case of tests/ops/cases.py with torch, and a replay with its run.

    The last batch holds NaN and infinity.
    """
    device = Accelerator()
    chosen = [PRECISIONS[name] for name in precisions]
    for (dtype, tf32), part in itertools.product(chosen, PARTS):
        what = {"dtype": dtype.name, "tf32": tf32}
        cases, executable = load_cases(device, dtype, tf32, folder, part)
        for batch in (*BATCHES, POISONED):
            given = cases
            if batch == POISONED:
                given = [c if c.name.startswith(GRADIENTS) else poisoned(c) for c in cases]
            inputs = draw(given, batch, dtype, device)
            outputs = [torch.from_dlpack(y) for y in executable.execute(*inputs)]
            for case, output in zip(given, outputs, strict=True):
                record = {"case": case.name, **what, "batch": batch}
                yield {**record, **checked(case, output, batch, dtype, tf32)}
            replayed = executable.capture(batch, *inputs)
            executable.replay(batch, *inputs)
            device.synchronize()
            same = all(
                torch.equal(torch.from_dlpack(a).nan_to_num(), b.nan_to_num())
                for a, b in zip(replayed, outputs, strict=True)
            )
            record = {"case": f"capture and replay of {part}", **what, "batch": batch}
            yield {**record, "passed": same}
    for dtype, tf32 in chosen:
        what = {"dtype": dtype.name, "tf32": tf32}
        cases, executable = load_cases(device, dtype, tf32, folder, "counted")
        outputs = executable.execute(*draw(cases, MANY, dtype, device))
        for case, output in zip(cases, outputs, strict=True):
            record = {"case": case.name, **what, "batch": MANY}
            yield {**record, **checked(case, torch.from_dlpack(output), MANY, dtype, tf32)}


def checked(
    case: Case, output: torch.Tensor, batch: int, dtype: DType, tf32: bool
) -> dict[str, Any]:
    """Compares an output with torch's: a part of a record."""
    try:
        error = check(case, output, batch, TORCH[dtype], "cuda", tf32=tf32)
    except AssertionError as problem:
        return {"passed": False, "why": str(problem)}
    return {"max_rel_err": error, "passed": True}


def models(folder: Path | None, precisions: list[str]) -> Iterator[dict[str, Any]]:
    """Compares networks of random weights with transformers, stage by stage."""
    for name, chosen in itertools.product(MODELS, precisions):
        dtype, tf32 = PRECISIONS[chosen]
        reference = reference_model(name)
        ours = Classifier(checkpoint(name, reference), Accelerator(), dtype, tf32=tf32)
        for suffix, (pixels, everything) in GRAPHS.items() if folder else ():
            path = artifact(folder, name, precision(dtype.name, tf32) + suffix)
            ours.adopt(path, pixels, everything)
        what = {"model": name, "dtype": dtype.name, "tf32": tf32}
        yield {**what, **errors(ours, reference, TORCH[dtype])}
        yield from ({**what, **each} for each in captured(ours))
        yield {**what, **beside_torch(ours)}
        del ours, reference
        gc.collect()
        torch.cuda.empty_cache()


def errors(ours: Classifier, reference: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
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


def captured(ours: Classifier, calls: int = 200) -> Iterator[dict[str, Any]]:
    """Calls a model with random batch sizes from four threads; compares with plain execution.

    Then again with the sizes captured that a server prepares, of which the next larger one runs.
    """
    rng = np.random.default_rng(0)
    size = (ours.preprocess.height, ours.preprocess.width, 3)
    batches = [rng.integers(0, 256, (n, *size), np.uint8) for n in range(1, MOST + 1)]
    order = rng.integers(0, len(batches), calls).tolist()

    def agree(held: list[int]) -> bool:
        alone = []
        for pixels, rows in zip(batches, held, strict=True):
            plain = Execution(ours.executable(), ours.place)
            plain.upload(np.concatenate([pixels, np.zeros((rows - len(pixels), *size), np.uint8)]))
            plain.run()
            alone.append(plain.result()[0][: len(pixels)])
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda i: ours(batches[i]), order))
        return all(np.array_equal(got, alone[i]) for got, i in zip(together, order, strict=True))

    exact = list(range(1, MOST + 1))
    yield {"case": "calls from threads", "calls": calls, "passed": agree(exact)}
    begun = time.perf_counter()
    ours.prepare(MOST)
    spent = round(time.perf_counter() - begun, 3)
    larger = [next(each for each in sizes(MOST) if each >= n) for n in exact]
    what = {"case": "calls of prepared sizes", "calls": calls, "prepared_s": spent}
    yield {**what, "passed": agree(larger)}


def beside_torch(ours: Classifier, calls: int = 40) -> dict[str, Any]:
    """Runs pixels that torch is still computing, in two streams by turns, which go on behind."""
    run = OnTensors(ours.executable(), ours.place)
    shape = (3, ours.preprocess.height, ours.preprocess.width, 3)
    pixels = [torch.randint(256, shape, dtype=torch.uint8, device="cuda") for _ in range(4)]
    alone = [run(each)[0].clone() for each in pixels]
    busy = torch.randn(4096, 4096, device="cuda")
    found = []
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for call in range(calls):
        with torch.cuda.stream(streams[call % 2]):
            for _ in range(4):
                (busy @ busy).sigmoid_()
            late = pixels[call % 4].clone()
            found.append(run(late)[0] * 1)
            del late
            torch.full(shape, 255, dtype=torch.uint8, device="cuda")  # in the memory of `late`
    torch.cuda.synchronize()
    agree = all(torch.equal(each, alone[i % 4]) for i, each in enumerate(found))
    return {"case": "in torch's order", "calls": calls, "passed": agree}


@torch.inference_mode()
def everything(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Runs a transformers model; returns its logits and its stages as [N, P, Q, C]."""
    outputs = model(x, output_hidden_states=True)
    stages = len(getattr(model.config, "depths", getattr(model.config, "depth", ())))
    maps = outputs.hidden_states[-stages:]
    return [outputs.logits, *(m.permute(0, 2, 3, 1) for m in maps)]


def bundled(
    folder: Path | None, photos: Path | None, precisions: list[str]
) -> Iterator[dict[str, Any]]:
    """Compares the bundled models' answers for pictures on the GPU with the CPU's in float32."""
    pictures = pictures_of(photos)
    for name in bundled_names():
        answers = {}
        for kind, dtype in [("cpu", "float32"), *(("gpu", each) for each in packaged(precisions))]:
            source = str(folder / f"{name}-{kind}-{dtype}") if folder else name
            model = load(source, device=kind, dtype=dtype)
            answers[kind, dtype] = model.classify(list(pictures), top_k=1)
        expected = answers["cpu", "float32"]
        for dtype in packaged(precisions):
            got = answers["gpu", dtype]
            pairs = [(a[0], b[0]) for a, b in zip(expected, got, strict=True)]
            different = sum(a.label != b.label for a, b in pairs)
            yield {
                "model": name,
                "dtype": dtype,
                "pictures": len(pictures),
                "other_labels": different,
                "largest_score_difference": max(abs(a.score - b.score) for a, b in pairs),
                "passed": not different,
            }


class Uploaded(Pillow):
    """Pillow in nvImageCodec's place, for a GPU: what is left to compare is ops/resample.mojo."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._there: dict[int, list[Buffer]] = {}

    def decode(self, files: Sequence[File], batch: int) -> list[Decoded | None]:
        found = super().decode(files, batch)
        there = self._there[batch] = [
            Buffer.from_numpy(each).to(self._device) for each in self.kept[batch]
        ]
        self._device.synchronize()
        sent = iter(there)
        return [each and each._replace(address=next(sent)._data_ptr()) for each in found]


def decoding(
    folder: Path | None, photos: Path | None, precisions: list[str]
) -> Iterator[dict[str, Any]]:
    """Compares pictures that the GPU decodes with those of the CPU: levels, and labels.

    Once it is given what Pillow has decoded, of every orientation: its pixels are the CPU's, all of
    them. Then nvImageCodec decodes.
    """
    files = [path.read_bytes() for path in pictures_of(photos)]
    for dtype in packaged(precisions):
        source = str(folder / f"{DEFAULT_MODEL}-gpu-{dtype}") if folder else DEFAULT_MODEL
        model = load(source, device="gpu", dtype=dtype, decode="gpu", batch_size=16)
        assert model.decoder is not None
        exact = model.preprocess
        read = [found for file in files if (found := jpeg.read(file, exact))]
        turned = [replace(each, orientation=1 + i % 8) for i, each in enumerate(read)]
        theirs = [exact(upright(each)) for each in turned]
        own, model.decoder._library = model.decoder._library, Uploaded(model.place)
        for case, some in (("resample", turned), ("decode", read)):
            ours = decoded(model, some)
            expected = theirs if case == "resample" else [exact(bytes(each.file)) for each in some]
            apart = np.abs(np.stack(ours).astype(int) - np.stack(expected))
            record = {
                "case": f"{case} on the GPU",
                "dtype": dtype,
                "pictures": len(some),
                "largest_level_difference": int(apart.max()),
                "mean_level_difference": round(float(apart.mean()), 4),
                "beyond_one_level": round(float((apart > 1).mean()), 5),
            }
            most = 0 if case == "resample" else AGREES
            yield {**record, "passed": bool(apart.mean() <= most)}
            model.decoder._library = own
        model.prepare(16)
        on_gpu = model.classify([bytes(file) for file in files], top_k=1)
        model.choose_decoder("cpu")
        on_cpu = model.classify([bytes(file) for file in files], top_k=1)
        pairs = [(a[0], b[0]) for a, b in zip(on_gpu, on_cpu, strict=True)]
        different = sum(a.label != b.label for a, b in pairs)
        yield {
            "model": DEFAULT_MODEL,
            "decode": "gpu",
            "dtype": dtype,
            "pictures": len(files),
            "decoded_by_the_gpu": len(read),
            "other_labels": different,
            "largest_score_difference": max(abs(a.score - b.score) for a, b in pairs),
            "passed": bool(read) and not different,
        }


def upright(picture: Jpeg) -> Image.Image:
    """Decodes a file, and turns it as if its EXIF said so."""
    image = Image.open(io.BytesIO(bytes(picture.file))).convert("RGB")
    turn = UPRIGHT.get(picture.orientation)
    return image if turn is None else image.transpose(turn)


def pictures_of(photos: Path | None) -> list[Path]:
    """Lists the examples and the user's pictures."""
    return [
        path
        for place in (ROOT / "examples", photos)
        for path in (sorted(place.iterdir()) if place else ())
        if path.suffix.lower() in EXTENSIONS
    ]


def timed(folder: Path | None, precisions: list[str]) -> Iterator[dict[str, Any]]:
    """Checks that what ``maxvision time`` measures of a bundled model hangs together."""
    name = bundled_names()[0]
    for dtype in packaged(precisions)[:1]:
        source = str(folder / f"{name}-gpu-{dtype}") if folder else name
        model = load(source, device="gpu", dtype=dtype)
        shape = (8, model.preprocess.height, model.preprocess.width, 3)
        options = argparse.Namespace(warm_up=0.2, duration=1.0, iterations=None, kernels=3)
        found = latency.measure(model.executor(), model.place, shape, options)
        times = {kind: found[kind]["p50_ms"] for kind in latency.SHARES}
        share = sum(each["us"] for each in found["kernels"]) / 1e3 / times["compute"]
        right = min(times.values()) > 0 and times["request"] > times["compute"]
        yield {
            "case": "maxvision time",
            "dtype": dtype,
            "p50_ms": times,
            "kernels_share": round(share, 2),
            "passed": bool(right and found["device_mb"] and 0 < share < 1.5),
        }


if __name__ == "__main__":
    leave(main())
