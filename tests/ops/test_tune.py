"""A sweep becomes a table: every product runs close to its best tile, and mistakes are told."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from maxvision.common.errors import DeviceError
from maxvision.ops import measure
from maxvision.ops.gemm import tune

ORIGINAL = tune.TABLE


def sweep(seed: int = 0, count: int = 350) -> str:
    """Times that grow with the tiles a product has, as on a GPU with 132 multiprocessors."""
    rng = random.Random(seed)
    lines = ["# Some GPU"]
    for layer in tune.layers()[: 2 * count : 2]:
        p = tune.product(layer)
        for config, (rows, columns) in enumerate([(128, 128), (128, 64), (64, 64), (64, 32)]):
            tiles = -(-p.pixels // rows) * -(-p.filters // columns)
            us = 2 + -(-tiles // 132) * p.steps * (rows + columns) / 500 * rng.uniform(1, 1.02)
            lines.append(f"row {' '.join(map(str, layer))} {config} 1 {us:.4f} 0.001")
    return "\n".join(lines)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuning.mojo"
    path.write_text(tune.TABLE.read_text())
    monkeypatch.setattr(tune, "TABLE", path)
    return path


def test_a_sweep_becomes_the_table(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "sweep.txt"
    measured.write_text(sweep())
    assert tune.main(["--from", str(measured), "--check"]) == 1
    assert "holds other rows" in capsys.readouterr().out
    assert table.read_text() == ORIGINAL.read_text()
    assert tune.main(["--from", str(measured)]) == 0
    assert tune.main(["--from", str(measured), "--check"]) == 0
    text = table.read_text()
    assert re.search(r"# rows: ops/gemm/tune.py, \d{4}-\d\d-\d\d, Some GPU\n", text)
    before = ORIGINAL.read_text()
    assert text.split(tune.HALF.begin)[0] == before.split(tune.HALF.begin)[0]
    assert text.split(tune.HALF.end)[1] == before.split(tune.HALF.end)[1]


def test_sums_of_two_products_have_a_table_of_their_own(table: Path, tmp_path: Path) -> None:
    measured = tmp_path / "sweep.txt"
    listed = tune.layers(tune.SHORTCUTS)
    assert listed and all(layer.beside for layer in listed)
    assert not any(layer.beside for layer in tune.layers())
    lines = [f"row {' '.join(map(str, layer))} 3 1 2.5 0.001" for layer in listed]
    measured.write_text("\n".join(["# Some GPU", *lines]))
    assert tune.main(["--from", str(measured), "--table", "shortcuts"]) == 0
    after, before = table.read_text(), ORIGINAL.read_text()
    assert tune.rows_of(after) == tune.rows_of(before)
    (row,) = filter(str.strip, tune.rows_of(after, tune.SHORTCUTS))
    assert row.strip() == 'Row(802816, 256, 2, "none", 3, 1),  # 2.50'


def test_every_product_runs_close_to_its_best() -> None:
    times = tune.read(sweep())
    chosen = tune.condense(times)
    assert len(chosen) < len(times)
    for product in times:
        assert tune.slowdown(times[product], tune.look_up(chosen, product)) <= tune.SLACK


@pytest.mark.parametrize(
    ("steps", "epilogue", "config"),
    [(6, "none", tune.FIRST_PINGPONG), (7, "none", 0), (6, "add", 0)],
)
def test_a_row_is_passed_over_whose_tile_does_not_take_the_product(
    steps: int, epilogue: str, config: int
) -> None:
    table = {
        tune.Product(6272, 768, 6, "none"): tune.Tile(tune.FIRST_PINGPONG, 1),
        tune.Product(100, 64, 72, "add"): tune.Tile(0, 1),
    }
    wanted = tune.Product(6272, 768, steps, epilogue)
    assert tune.look_up(table, wanted).config == config


def test_a_row_of_a_pingpong_tile_in_8_bits_names_another_too() -> None:
    layer = "6272 1 384 768 1 1 relu"
    tiles = {0: 9, 2: 7, 5: 1.1, tune.FIRST_PINGPONG: 1, 10: 1.2}
    rows = "\n".join(f"row {layer} {c} 1 {us} 0" for c, us in tiles.items())
    times = tune.read(rows, tune.BYTES)
    text = tune.with_rows(ORIGINAL.read_text(), times, tune.condense(times), "now", tune.BYTES)
    row = 'Row(6272, 768, 3, "none", 12, 1, 2),  # 1.00'
    assert tune.rows_of(text, tune.BYTES)[0].strip() == row


def test_tiles_are_counted_as_in_the_table() -> None:
    text = ORIGINAL.read_text()

    def tiles(name: str) -> list[str]:
        listed = re.search(rf"comptime {name}: List\[\w+\] = \[\n(.*?)\n\]", text, re.DOTALL)
        assert listed
        return listed.group(1).splitlines()

    configs = tiles("CONFIGS")
    assert len(configs) + len(tiles("RESIDENT")) == tune.FIRST_PINGPONG
    assert len(tune.PINGPONG_STEPS) == len(tiles("PINGPONG"))
    alone = [i for i, tile in enumerate(configs) if "split" not in tile and "peers" not in tile]
    assert list(tune.COOPERATIVE) == alone


def test_a_table_that_predicts_badly_is_not_written(table: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    noise = [
        re.sub(r"[\d.]+ 0\.001$", f"{rng.uniform(1, 9)} 0.001", x)
        for x in sweep(count=60).splitlines()
    ]
    measured = tmp_path / "sweep.txt"
    measured.write_text("\n".join(noise))
    assert tune.main(["--from", str(measured)]) == 1
    assert table.read_text() == ORIGINAL.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"--from .*sweep.txt: the sweep cannot be read \("),
        ("nothing", "sweep.txt has no lines 'row ...'; give a sweep"),
        (sweep().partition("\n")[2], "the sweep does not begin with a line .*; say .* with --on"),
        ("# x\nrow 1 56 64 64 1 1 relu 0 1 3.84 0.5", "an error below 0.004 but this is 'row"),
        ("# x\nrow 1 56 64 64 1 1 relu 0 1 3.84 nan", "an error below 0.004 but this is 'row"),
        ("# x\nrow 1 56", "must have fourteen words but this is 'row 1 56'"),
    ],
)
def test_mistakes_get_one_sentence(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    measured = tmp_path / "sweep.txt"
    if text is not None:
        measured.write_text(text)
    assert tune.main(["--from", str(measured)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and re.search(message, said), said


def test_another_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "accelerator_count", lambda: 0)
    assert tune.main([]) == 2
    assert "tune needs a Hopper GPU, sm_90a, but this machine has none" in capsys.readouterr().err


def test_a_program_is_built_and_gets_its_lines(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(open(sys.argv[1]).read(), end='')\n")
    program.chmod(0o755)
    assert measure.run("gemm.tune", ["a", "b"], program) == "a\nb\n"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such GPU')\n")
    with pytest.raises(DeviceError, match=r"ops.gemm.tune failed on the GPU: no such GPU"):
        measure.run("gemm.tune", [], program)
