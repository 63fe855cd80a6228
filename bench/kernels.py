"""Sparse convolutions on a GPU, each kernel alone, beside the dense one and cuDNN's.

A graph of one layer would time its launch. So ops/sparse_conv2d/measure.mojo launches a kernel many
times over in a CUDA graph, each launch with another copy of the filter, and checks what it gives;
cuDNN's convolution with bias and relu, channels last, runs in a CUDA graph of torch's likewise.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.dtype import DType

from maxvision.bench.engines import TORCH, captured
from maxvision.bench.timing import TorchClock, rounded, sample
from maxvision.common.host import cores
from maxvision.graphs import arrange, formats
from maxvision.graphs.layers import Layer
from maxvision.graphs.target import Target
from maxvision.ops import measure as measuring

MODULE = "sparse_conv2d.measure"
LAUNCHES = 20
"""Of cuDNN's in a CUDA graph, each with a filter of its own."""
CLOSE = 4e-3
"""Largest difference from the CUDA-core kernel, in the Frobenius norm: half an ulp of bfloat16."""
BLOCKS = (0.5, 0.25, 0.1)
"""Densities of blocks."""


@dataclass(frozen=True)
class Case:
    """A distinct convolution and its weights at one density.

    Attributes:
        layer: The first of its kind in the network.
        names: Of all layers of this kind and, if they are the model's own, this density.
        density: Share of nonzeros.
        filters: [R, S, C, F].
        pattern: Where its zeros are: ``unstructured``, ``2:4``, ``64x64``; nothing if unknown.
    """

    layer: Layer
    names: tuple[str, ...]
    density: float
    filters: np.ndarray
    pattern: str = ""

    def about(self, batch: int) -> dict[str, Any]:
        """Begins the record of a measurement."""
        layer = self.layer
        return {
            "kind": "sparse layer", "batch": batch, "layer": layer.title(),
            "kernel": layer.kernel, "stride": layer.stride,
            "channels": layer.channels, "filters": layer.filters, "pixels": layer.pixels,
            "count": len(self.names), "names": self.names, "density": rounded(self.density, 3),
        }  # fmt: skip


def patterned(case: Case) -> Iterator[Case]:
    """Draws the layer of a case with 2:4 sparse channels, and in blocks."""
    filters, rng = case.filters, np.random.default_rng(0)
    c, f = filters.shape[2:]
    if c % 8 or f % 8:  # the kernels do not take it
        return
    fours = rng.random((*filters.shape[:2], c // 4, 4, f)).argsort(axis=3) < 2
    kept = filters * fours.reshape(filters.shape)
    yield Case(case.layer, case.names, 0.5, kept, "2:4")
    size = formats.BLOCK
    shape = (*filters.shape[:2], math.ceil(c / size), math.ceil(f / size))
    order = rng.permutation(math.prod(shape)).reshape(shape) / math.prod(shape)
    for density in BLOCKS:
        kept_blocks = (order < density).repeat(size, axis=2).repeat(size, axis=3)
        kept = filters * kept_blocks[:, :, :c, :f]
        share = np.count_nonzero(kept) / kept.size
        yield Case(case.layer, case.names, share, kept, "64x64")


def measure(
    cases: Sequence[Case],
    batches: Sequence[int],
    target: Target,
    dtype: DType,
    program: Path | None,
) -> Iterator[dict[str, Any]]:
    """Measures every case in each format that suits it.

    Args:
        cases: The layers.
        batches: Images.
        target: The GPU.
        dtype: Of activations and filters.
        program: ops/sparse_conv2d/measure.mojo as built for this GPU; built here if None.

    Raises:
        DeviceError: If the program fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if program is None:
            program = folder / "program"
            measuring.build(MODULE, program)
        suited = [formats.suited(case.filters, case.layer.groups, target, dtype) for case in cases]
        places = [folder / str(i) for i in range(len(cases))]
        with ProcessPoolExecutor(cores()) as pool:
            kinds = map(_measured, cases, suited)
            for _ in pool.map(_write, places, cases, kinds, [dtype] * len(cases)):
                pass
        for batch in batches:
            yield from _measure(cases, suited, places, batch, dtype, program)


def _measure(
    cases: Sequence[Case],
    suited: Sequence[Sequence[str]],
    places: Sequence[Path],
    batch: int,
    dtype: DType,
    program: Path,
) -> Iterator[dict[str, Any]]:
    """Measures one batch size."""
    lines: list[str] = []
    dense: dict[tuple[Layer, str], int] = {}
    wanted: list[tuple[Case, str, bool, int]] = []
    for case, suits, place in zip(cases, suited, places, strict=True):
        for kind in ["dense", "exact"] if dtype == DType.float32 else ["dense"]:
            if (case.layer, kind) not in dense:
                dense[case.layer, kind] = len(lines)
                lines.append(_line(kind, dtype, case.layer, batch, place))
        for kind in _measured(case, suits):
            wanted.append((case, kind, kind in suits, len(lines)))
            lines.append(_line(kind, dtype, case.layer, batch, place / kind))
    said = measuring.run(MODULE, lines, program).splitlines()
    times = {int(row): (float(us), float(error)) for _, row, us, error in map(str.split, said[1:])}
    cudnn = {layer: cudnn_us(layer, batch, dtype) for layer in {each.layer for each in cases}}
    for case, kind, suits_case, row in wanted:
        us, error = times[row]
        dense_us = times[dense[case.layer, "dense"]][0]
        exact = dense.get((case.layer, "exact"))
        yield {
            **case.about(batch),
            "pattern": case.pattern, "format": kind, "suited": suits_case,
            "dense_us": rounded(dense_us), "sparse_us": rounded(us),
            "dense_p10_us": rounded(dense_us), "sparse_p10_us": rounded(us),
            "exact_us": None if exact is None else rounded(times[exact][0]),
            "cudnn_us": rounded(cudnn[case.layer]), "gain": rounded(dense_us / us, 3),
            "difference": rounded(error), "passed": bool(error <= CLOSE),
        }  # fmt: skip


def cudnn_us(layer: Layer, batch: int, dtype: DType) -> float:
    """Times cuDNN's convolution with bias and relu, channels last, µs."""
    torch.backends.cudnn.benchmark = True
    options: dict[str, Any] = {"device": "cuda", "dtype": TORCH[dtype.name]}
    h, w = (side * layer.stride for side in layer.size)
    x = torch.randn(batch, layer.channels, h, w, **options)
    x = x.to(memory_format=torch.channels_last)
    shape = (layer.filters, layer.channels, layer.kernel, layer.kernel)
    filters = [
        torch.randn(shape, **options).to(memory_format=torch.channels_last)
        for _ in range(min(LAUNCHES, 8))
    ]
    bias = torch.zeros(layer.filters, **options)

    def launches() -> None:
        for i in range(LAUNCHES):
            torch.cudnn_convolution_relu(
                x, filters[i % len(filters)], bias, [layer.stride] * 2, [layer.kernel // 2] * 2,
                [1, 1], 1,
            )  # fmt: skip

    return min(sample(TorchClock(), captured(launches), 0.01)) * 1e3 / LAUNCHES


def _measured(case: Case, suited: Sequence[str]) -> list[str]:
    """Names the formats that a case is measured in: those that suit it, and the general one."""
    general = ["steps"] if case.pattern in ("", "unstructured") else []
    return list(dict.fromkeys([*suited, *general]))


def _write(place: Path, case: Case, kinds: Sequence[str], dtype: DType) -> None:
    place.mkdir()
    filters = arrange.rounded(arrange.filter_major(case.filters), dtype)
    filters.tofile(place / "dense")
    for kind in kinds:
        (place / kind).mkdir()
        (place / kind / "dense").symlink_to(place / "dense")
        arrays = formats.arranged(kind, case.filters, case.layer.groups, dtype)
        for i, (_, array, wanted) in enumerate(arrays):
            arrange.rounded(array, wanted).tofile(place / kind / str(i))


def _line(kind: str, dtype: DType, layer: Layer, batch: int, place: Path) -> str:
    side = layer.size[0] * layer.stride
    sizes = (batch, side, layer.channels, layer.filters, layer.kernel, layer.stride)
    return " ".join(map(str, (kind, dtype.name, *sizes, place)))
