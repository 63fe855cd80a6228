"""What runs pruned layers: the choice from a table, and that all choices give equal answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef

from maxvision import run_graph, runtime, weights
from maxvision.commands import classify as cli
from maxvision.commands import compile as command
from maxvision.commands.weights import main as weights_command
from maxvision.common.errors import ArgumentError, DeviceError, ModelError
from maxvision.graphs import passes, sparsity
from maxvision.graphs.backend import Backend
from maxvision.graphs.layers import Layer, layers
from maxvision.graphs.resnet import RESNETS
from maxvision.graphs.sparsity import MARGIN, TABLES, Row, choose, read_table, table_name
from maxvision.graphs.target import Target
from maxvision.runtime import ahead, cache
from maxvision.runtime import artifact as package
from maxvision.runtime.classifier import build, choose_sparse
from maxvision.runtime.executor import Unchecked
from maxvision.runtime.pipeline import Times
from maxvision.weights.family import known
from tests.graphs import reference
from tests.runtime.test_classifier import PREPROCESS, SMALL, levels

HERE = Target.of(CPU())
KINDS = (".weight", ".filter")
ROW = Row(3, 1, 64, 64, 1024, 1, 100.0, ((0.1, 40.0), (0.2, 70.0), (0.4, 130.0)))
LAYER = Layer("a", 3, 1, 64, 64, (32, 32))


def tabled(*rows: Row) -> dict[str, Any]:
    """Writes rows as ``bench sparse --table`` does."""
    listed = [{**vars(row), "sparse_us": list(row.sparse_us)} for row in rows]
    return {"device": "x", "dtype": "float32", "measured": {"date": "today", "cpu": "this"},
            "rows": listed}  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a table for this machine."""
    monkeypatch.setattr(sparsity, "TABLES", tmp_path)
    read_table.cache_clear()

    def make(*rows: Row) -> None:
        (tmp_path / table_name(HERE, "float32")).write_text(json.dumps(tabled(*rows)))
        read_table.cache_clear()

    yield make  # type: ignore[misc]
    read_table.cache_clear()


def chosen(found: list[Layer], density: float, mode: str = "auto") -> sparsity.Choice:
    zeros = {layer.name: 1 - density for layer in found}
    return choose("net", found, zeros, mode, HERE, DType.float32)


def test_gains_lie_between_what_was_measured() -> None:
    assert ROW.gain(0.1) == 2.5 and ROW.gain(0.01) == 2.5
    assert ROW.gain(0.15) == pytest.approx(100 / 55)
    assert ROW.gain(0.8) == pytest.approx(100 / 260)  # beyond the last it goes on growing
    assert ROW.break_even() == pytest.approx(0.3)
    assert replace(ROW, dense_us=10.0).break_even() == 0
    assert replace(ROW, dense_us=999.0).break_even() == 0.4


@pytest.mark.parametrize(("density", "sparse"), [(0.1, True), (0.26, True), (0.29, False)])
def test_auto_takes_what_is_faster_by_a_margin(
    tables: Callable[..., None], density: float, sparse: bool
) -> None:
    tables(ROW)
    choice = chosen([LAYER], density)
    assert choice.layers == ({"a"} if sparse else set())
    assert (choice.verdicts[0].gain or 0) >= 1 and (choice.verdicts[0].gain >= MARGIN) == sparse  # type: ignore[operator]
    told = "1 of 1 pruned layers sparse" if sparse else "as no sparse layer would be faster"
    assert told in choice.short.told


def test_auto_needs_to_win_at_every_batch(tables: Callable[..., None]) -> None:
    tables(ROW, replace(ROW, batch=16, dense_us=30.0))
    assert not chosen([LAYER], 0.1).layers


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"channels": 128, "filters": 32, "size": (40, 40)}, True),
        ({"channels": 129}, False),
        ({"size": (15, 15)}, False),
        ({"kernel": 1}, False),
        ({"stride": 2}, False),
        ({"groups": 64}, False),
    ],
)
def test_rows_stand_for_layers_like_theirs(
    tables: Callable[..., None], change: dict[str, Any], found: bool
) -> None:
    tables(ROW)
    assert bool(chosen([replace(LAYER, **change)], 0.1).layers) == found


def test_the_worst_of_the_rows_counts_unless_one_is_the_layers_own(
    tables: Callable[..., None],
) -> None:
    slow = replace(ROW, channels=96, dense_us=20.0)
    tables(ROW, slow)
    assert chosen([LAYER], 0.1).layers == {"a"}
    assert not chosen([replace(LAYER, channels=80)], 0.1).layers


@pytest.mark.parametrize(("batch", "sparse"), [(None, False), (1, True), (3, True), (16, False)])
def test_the_batch_that_was_asked_for_decides(
    tables: Callable[..., None], batch: int | None, sparse: bool
) -> None:
    tables(ROW, replace(ROW, batch=16, dense_us=30.0))
    zeros = {"a": 0.9}
    choice = choose("net", [LAYER], zeros, "auto", HERE, DType.float32, batch=batch)
    assert bool(choice.layers) == sparse


def test_of_formats_that_suit_the_fastest_is_taken(tables: Callable[..., None]) -> None:
    tables(replace(ROW, format="blocks"), replace(ROW, format="tiles", dense_us=200.0))

    def formats(*suited: str) -> dict[str, str]:
        return choose(
            "net", [LAYER], {"a": 0.9}, "auto", HERE, DType.float32, formats_of=lambda layer: suited
        ).formats

    assert formats("blocks") == {"a": "blocks"}
    assert formats("blocks", "tiles") == formats("tiles", "two_four") == {"a": "tiles"}
    assert formats("two_four") == {} == formats("steps")


@pytest.mark.parametrize(
    ("format", "zeros", "batch", "least"),
    [("tiles", 0.9, 1, 7), ("tiles", 0.9, 32, 0), ("tiles", 0.9, None, 0),
     ("two_four", 0.5, 32, 16), ("two_four", 0.5, 1, 0), ("blocks", 0.75, None, 30)],
)  # fmt: skip
def test_auto_on_hopper(format: str, zeros: float, batch: int | None, least: int) -> None:
    program = known()["resnet"].program(RESNETS["resnet50"], (224, 224))
    found = layers(program, passes.run(program, Backend("cuda", "bfloat16")))
    choice = choose(
        "net", found, {each.name: zeros for each in found}, "auto", Target.parse("sm_90a"),
        DType.bfloat16, formats_of=lambda layer: (format,), batch=batch,
    )  # fmt: skip
    assert least <= len(choice.layers) <= 52 * (least > 0)
    for each in choice.verdicts:
        ties = {each.layer.partner} - {""}
        assert not each.sparse or ties <= choice.layers
        assert not each.sparse or (each.gain or 0) >= MARGIN
    beside = {name for each in found if each.name.endswith("shortcut")
              for name in (each.name, each.partner)}  # fmt: skip
    assert len(beside) == 8
    chained = [each.name for each in found if each.partner and each.name not in beside]
    assert len(chained) == 8
    assert chained[:4] == [
        "stages.0.1.conv3", "stages.0.2.conv1", "stages.0.2.conv3", "stages.1.0.conv1",
    ]  # fmt: skip


def test_a_gpu_without_tf32_has_a_table_of_its_own() -> None:
    hopper = Target.parse("sm_90a")
    names = [
        sparsity.precision(hopper, DType.float32, True),
        sparsity.precision(hopper, DType.float32, False),
        sparsity.precision(hopper, DType.bfloat16, False),
        sparsity.precision(HERE, DType.float32, False),
    ]
    assert names == ["float32", "float32-exact", "bfloat16", "float32"]


def test_two_that_run_as_one_dense_kernel_are_both_sparse_or_neither(
    tables: Callable[..., None],
) -> None:
    tables(ROW)
    pair = [replace(LAYER, partner="b"), replace(LAYER, name="b", partner="a")]
    assert chosen(pair, 0.1).layers == {"a", "b"}
    pair[1] = replace(pair[1], kernel=1)
    choice = chosen(pair, 0.1)
    assert not choice.layers
    assert choice.verdicts[0].why == "one dense kernel computes it with b"


def test_devices_without_a_table_run_dense_and_say_so(tables: Callable[..., None]) -> None:
    assert chosen([LAYER], 0.1).short.told == (
        "pruned, runs dense because there is no break-even table for a CPU in float32"
    )
    tables(ROW)
    zeros = {"a": 0.9}
    narrow = choose("net", [LAYER], zeros, "auto", HERE, DType.bfloat16)
    assert not narrow.layers and "for a CPU in bfloat16" in narrow.short.told
    gpu = choose("net", [LAYER], zeros, "auto", Target.parse("sm_90a"), DType.float32)
    assert not gpu.layers and "for sm_90a in float32" in gpu.short.told
    assert chosen([LAYER], 0.1, "never").short.told == "pruned, runs dense as asked for"
    assert chosen([LAYER], 1.0).short.told == ""  # nothing is said of a dense model


def test_tables_are_named_by_vectors_and_architectures() -> None:
    names = {
        "cpu:x86-64-v3": "cpu-avx2-float32.json",
        "cpu:sapphirerapids": "cpu-avx512f-float32.json",
        "sm_90a": "sm_90-float32.json",
        "gfx942": "gfx942-float32.json",
    }
    if HERE.machine == "x86_64":
        for target, name in names.items():
            assert table_name(Target.parse(target), "float32") == name


def test_always_is_refused_where_nothing_can_be_sparse() -> None:
    with pytest.raises(DeviceError, match=r"needs float32 on a CPU but .* bfloat16; use that"):
        choose("net", [LAYER], {"a": 0.9}, "always", HERE, DType.bfloat16)
    with pytest.raises(ModelError, match=r"is not pruned: no layer has 10% zeros"):
        chosen([LAYER], 1.0, "always")
    with pytest.raises(
        ArgumentError, match="sparse must be one of auto, always, never but is 'maybe'"
    ):
        chosen([LAYER], 0.1, "maybe")


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_the_tables_that_are_here_can_be_read(path: Path) -> None:
    table = read_table(path)
    assert table and table.rows
    assert path.name == f"{table.device}-{table.dtype}.json"
    assert {"cpu", "commit", "date", "command"} <= set(table.measured)
    for row in table.rows:
        assert row.dense_us > 0 and all(0 < d <= 1 and us > 0 for d, us in row.sparse_us)


# --- whole models -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> dict[float, str]:
    """Writes a small ResNet pruned to two shares of zeros, and as it was."""
    folder = tmp_path_factory.mktemp("pruned")
    dense = reference.save(reference.resnet(0, **SMALL), folder / "dense", PREPROCESS)
    made = {0.0: dense}
    for share in (0.7, 0.9):
        made[share] = str(folder / str(share))
        assert weights_command(["prune", dense, "--sparsity", str(share), "-o", made[share]]) == 0
    return made


@pytest.mark.nightly
def test_auto_always_and_never_answer_alike(
    pruned: dict[float, str], tables: Callable[..., None], tmp_path: Path
) -> None:
    pixels = levels(3)
    never = runtime.load(pruned[0.9], device="cpu", sparse="never")
    always = runtime.load(pruned[0.9], device="cpu", sparse="always")
    assert never.sparse.layers == () and "stem" not in always.sparse.layers
    assert len(always.sparse.layers) == 5  # of two basic blocks, the second with a shortcut
    dense, sparse = never(pixels), always(pixels)
    assert np.abs(dense).max() > 0.1
    assert np.abs(dense - sparse).max() <= 1e-5 * np.abs(dense).max()
    summary = cli._summary(always, Times(), cli.Tally(1))
    assert summary.endswith("on cpu, float32; 5 of 5 pruned layers sparse")

    checkpoint = weights.load(pruned[0.9])
    tables(*(  # that says of every layer that sparse is faster: the graph of always
        Row(x.kernel, x.stride, x.channels, x.filters, x.pixels, 1, 10.0, ((0.5, 1.0),))
        for x in layers(checkpoint.program((32, 32)))
    ))  # fmt: skip
    auto = runtime.load(pruned[0.9], device="cpu")
    assert auto.sparse.layers == always.sparse.layers and "compile" not in auto.seconds
    assert np.array_equal(auto(pixels), sparse)

    folder = tmp_path / "packed"
    made = ahead.compile(pruned[0.9], folder, sparse="always")
    assert made.sparse == always.sparse == package.read(folder).sparse
    packed = runtime.load(str(folder), sparse="always")
    assert np.array_equal(packed(pixels), sparse)
    with pytest.raises(DeviceError, match=r"compiled with sparse always but sparse is never"):
        runtime.load(str(folder), sparse="never")


def test_the_cache_tells_sparse_graphs_apart(pruned: dict[float, str]) -> None:
    def key(share: float, mode: str) -> str:
        checkpoint, size = weights.load(pruned[share]), (32, 32)
        choice = choose_sparse(checkpoint, mode, HERE, DType.float32, size)
        graph, _ = build(
            checkpoint, DeviceRef.CPU(), DType.float32, size=size, sparse=choice.formats,
            kernels=Unchecked(),
        )  # fmt: skip
        return cache.key(graph, HERE)

    keys = [key(0.9, "never"), key(0.9, "always"), key(0.7, "always")]
    assert len(set(keys)) == 3
    assert key(0.7, "never") == keys[0] == key(0.0, "auto")  # one dense graph for all weights


def test_linear_layers_run_sparse_too() -> None:
    checkpoint = weights.load("cvt-cifar10")
    names = {"stages.1.0.attention.query", "stages.0.0.mlp.fc1", "stages.1.embed", "head"}
    _, parameters = build(
        checkpoint, DeviceRef.CPU(), DType.float32, size=(128, 128),
        sparse=dict.fromkeys(names, "stream"),
        kernels=Unchecked(),
    )  # fmt: skip
    dense = {name.rpartition(".")[0] for name in parameters.bound if name.endswith(KINDS)}
    assert {each.name for each in layers(checkpoint.program((128, 128)))} - dense == names


def test_the_command_line_takes_the_mode(
    pruned: dict[float, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    arguments = [pruned[0.0], "--sparse", "always", "-o", out]
    assert command.main(arguments) == 2
    assert "prune it with maxvision weights prune, or omit --sparse" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([*arguments[:2], "sometimes", "-o", out])
    assert run_graph.parse(["x.jpg", "--sparse", "never"]).sparse == "never"
    assert run_graph.parse(["x.jpg"]).sparse == "auto"


def test_inspect_names_patterns_and_what_runs_them(
    pruned: dict[float, str], tables: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert weights_command(["inspect", pruned[0.0], "--device", "cpu"]) == 0
    assert "Pruned layers" not in capsys.readouterr().out
    assert weights_command(["inspect", pruned[0.9], "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "unstructured" in said and "because there is no break-even table" in said
    (first,) = [
        x for x in layers(weights.load(pruned[0.9]).program((32, 32)))
        if x.name == "stages.0.0.conv1"
    ]  # fmt: skip
    tables(
        Row(3, 1, first.channels, first.filters, first.pixels, 1, 10.0, ((0.5, 4.0),)),
    )
    assert weights_command(["inspect", pruned[0.9], "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if first.name in line and "px" in line)
    assert "sparse" in row and "2.50 x" in row
    assert "estimated at batch 1" in said and "by the table of today, this" in said
