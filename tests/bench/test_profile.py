"""A recorded trace becomes launches: averaged, in order, with names that can be read."""

from __future__ import annotations

from typing import Any

import pytest

from bench.profile import launches, short, trace
from graphs.errors import DeviceError


def event(ts: float, name: str, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"grid": [2, 1, 1]}}


def test_launches_are_averaged_by_their_place() -> None:
    recorded = [
        event(20, "a", 3), event(25, "b", 1), event(27, "a", 5),
        event(10, "a", 1), event(12, "b", 1), event(14, "a", 7),
        {"cat": "cpu_op", "name": "cudaGraphLaunch", "ts": 0, "dur": 9}, {"ph": "M"},
    ]  # fmt: skip
    found = launches({"traceEvents": recorded}, runs=2)
    assert [(x.place, x.name, x.us, x.start_us) for x in found] == [
        (0, "a", 2, 0), (1, "b", 1, 3.5), (2, "a", 6, 5.5),
    ]  # fmt: skip
    assert [e["ts"] for e in trace(found, "title", 0) if e["ph"] == "X"] == [0, 3.5, 5.5]


@pytest.mark.parametrize("names", ["", "aba", "abba"])
def test_runs_that_differ_are_refused(names: str) -> None:
    recorded = [event(i, name, 1) for i, name in enumerate(names)]
    with pytest.raises(DeviceError, match=f"2 runs of the same launches .* {len(names)};"):
        launches({"traceEvents": recorded}, runs=2)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("mojo_pkg_a6ca41faf4243323bf43a88_ecaaee027bebf90a", "unnamed ecaa"),
        ("conv2d_wgmma_128x128_bfloat16_17266de5", "conv2d_wgmma_128x128_bfloat16 1726"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_3"),
        ("void at::native::(anonymous namespace)::norm<float, 4>(int, float*)", "norm"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16>(Params)", "cutlass_tensorop_bf16"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "),
    ],
)
def test_names(symbol: str, name: str) -> None:
    assert short(symbol) == name
