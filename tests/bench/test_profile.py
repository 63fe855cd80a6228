"""A recorded trace becomes launches: averaged, in order, with names that can be read."""

from __future__ import annotations

from typing import Any

import pytest
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.bench import summaries
from maxvision.bench.launches import by_kernel, launches, short
from maxvision.bench.layers import network_nodes, sizes
from maxvision.bench.profile import named, trace
from maxvision.bench.references import checkpoint, reference_model
from maxvision.common.errors import DeviceError
from tests.bench.test_layers import symbol


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


def test_a_launch_adds_what_no_other_hides() -> None:
    """The second begins while the first runs, the third within it, the fourth after a gap."""
    recorded = [event(0, "a", 10), event(8, "b", 4), event(9, "c", 1), event(15, "d", 2)]
    found = launches({"traceEvents": recorded}, runs=1)
    assert [x.adds_us for x in found] == [10, 2, 0, 5]
    assert sum(x.adds_us for x in found) == 17


def test_launches_are_summed_up_by_kernel() -> None:
    recorded = [event(0, "a", 2), event(2, "b", 5), event(7, "a", 1)]
    assert by_kernel(launches({"traceEvents": recorded}, runs=1)) == [("b", 1, 5), ("a", 2, 3)]


def test_launches_are_named_after_layers(capsys: pytest.CaptureFixture[str]) -> None:
    network = reference_model("resnet-18")
    nodes = network_nodes(
        checkpoint("resnet-18", network), DeviceRef.CPU(), DType.float32, (224, 224)
    )
    recorded = [event(i, symbol(node), 1) for i, node in enumerate(nodes)]
    for each, node in zip(recorded, nodes, strict=True):
        each["args"]["grid"] = list(sizes(node.layer.outputs[0], 1))
    found = launches({"traceEvents": recorded}, runs=1)
    with_names = named(found, "resnet-18", network, DType.float32, CPU())
    assert [x.layer for x in with_names] == [node.name for node in nodes]
    assert trace(with_names, "title", 0)[2]["name"] == "stem"
    summaries.launches(with_names, "title", 0)
    assert "stages.3.1.conv2" in capsys.readouterr().out
    assert named(found[:-1], "resnet-18", network, DType.float32, CPU()) == found[:-1]
    assert "layers are not named: 20 launches" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["", "aba", "abba"])
def test_runs_that_differ_are_refused(names: str) -> None:
    recorded = [event(i, name, 1) for i, name in enumerate(names)]
    with pytest.raises(DeviceError, match=f"CUPTI recorded {len(names)} launches"):
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
