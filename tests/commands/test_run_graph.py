"""The command line: what it prints and where, its exit codes, and what bad input gets.

Most tests run `main` in this process with a stand-in for the model. The last ones start the real
program with the default model.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxvision import run_graph, runtime
from maxvision.commands import classify as cli
from maxvision.commands import models
from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.errors import DeviceError, ModelError
from maxvision.graphs.sparsity import Chosen
from maxvision.runtime.preprocess import Preprocess

ROOT = Path(__file__).resolve().parents[2]
NAMED = ["--model", "m"]
"""Names a model in place of the default one."""
LABELS = ["tabby, tabby cat", "[bold]tiger[/bold]", "käfer", "frog"]


@dataclass
class Fake:
    """Stands in for a model: the logits are the mean of each channel, and 0."""

    name: str = "fake"
    device: str = "cpu"
    dtype: str = "float32"
    tf32: bool = False
    sparse: Chosen = field(default_factory=lambda: Chosen("auto", (), ""))
    labels: list[str] = field(default_factory=lambda: list(LABELS))
    read: Preprocess = field(default_factory=lambda: Preprocess(8, 8, 8))
    decoder: None = None
    batch_size: int = 8
    compiles: bool = False
    batches: list[int] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[np.ndarray], None] = lambda _: None
    seconds: dict[str, float] = field(default_factory=lambda: {"weights": 0.25, "graph": 1.5})

    def resize_by_vectors(self) -> None:
        pass

    def run(self, pictures: list[np.ndarray], _: list[Any]) -> list[np.ndarray]:
        pixels = np.stack(pictures)
        assert pixels.dtype == np.uint8 and pixels.shape[1:] == (8, 8, 3)
        self.batches.append(len(pixels))
        logits = np.zeros((len(pixels), 4), np.float32)
        logits[:, :3] = pixels.mean((1, 2)) / 10
        self.spoil(logits)
        return list(logits)

    def predictions(self, logits: np.ndarray, top_k: int) -> list[list[Any]]:
        exps = np.exp(logits - logits.max(1, keepdims=True))
        rows = exps / exps.sum(1, keepdims=True)
        return [
            [
                SimpleNamespace(label=self.labels[i], class_id=int(i), score=float(row[i]))
                for i in np.argsort(-row)[:top_k]
            ]
            for row in rows
        ]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    model = Fake()

    def load(source: str, **options: Any) -> Fake:
        if model.compiles:
            options["progress"]("compiling fake")
        model.asked = {"source": source, **options}
        model.batch_size = options["batch_size"] or model.batch_size
        return model

    monkeypatch.setattr(runtime, "load", load, raising=False)
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a red, a green and a blue picture and what is no picture."""
    monkeypatch.chdir(tmp_path)
    for name, colour in ("r.png", "red"), ("g.JPG", "lime"), ("sub/b.webp", "blue"):
        path = tmp_path / "all" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), colour).save(path, quality=95)
    (tmp_path / "all" / "notes.txt").write_text("no picture")
    (tmp_path / "all" / ".hidden.png").write_text("no picture")
    (tmp_path / "text.jpg").write_text("no picture")
    return tmp_path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = run_graph.main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


def lines(text: str) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert text.isascii() and (not text or text.endswith("\n"))
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# --- answers ----------------------------------------------------------------------------------


def test_one_image_is_a_table(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("all/r.png", *NAMED)
    assert (code, err) == (0, "")
    assert "all/r.png" in out and "rank" in out and "label" in out and "score" in out
    assert re.search(r"1 .*tabby, tabby cat .* 1\.0000", out)
    assert "[bold]tiger[/bold]" in out and "käfer" in out
    assert out.splitlines()[-1].startswith("fake on cpu, float32; preprocessing ")
    assert re.search(r"ms an image; first run [\d.,]+ ms; warm run [\d.,]+ ms$", out.strip())
    assert fake.batches == [1, 1]


def test_names_are_no_markup(fake: Fake, folder: Path, run: Run) -> None:
    fake.name, fake.labels[0] = "[b]o/:cat:", ":dog:"
    _, out, _ = run("all/r.png")
    assert ":dog:" in out and out.splitlines()[-1].startswith("[b]o/:cat: on cpu")


def test_several_images_are_a_line_each(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("all", "--top-k", "2", *NAMED)
    assert (code, err) == (0, "")
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names[:3] == ["all/g.JPG", "all/r.png", "all/sub/b.webp"]
    assert out.splitlines()[1] == "all/r.png  tabby, tabby cat 1.0000 | [bold]tiger[/bold] 0.0000"
    assert "3 images" in out


def test_json(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("all/sub/b.webp", "--json", "--top-k", "3", "text.jpg", "all/r.png")
    assert code == 1
    blue, text, red = lines(out)
    assert blue["image"] == "all/sub/b.webp" and blue["model"] == "fake"
    assert list(blue) == ["image", "model", "predictions"]
    assert [set(p) for p in blue["predictions"]] == [{"label", "class_id", "score"}] * 3
    assert blue["predictions"][0] == {"label": "käfer", "class_id": 2, "score": 1.0}
    assert list(text) == ["image", "error"] and "this is text and not a" in text["error"]
    assert red["predictions"][0]["class_id"] == 0
    assert "fake on cpu, float32" in err and "1 of 3 images failed" in err
    assert fake.batches == [2], "no run for the time alone"


def test_logits(fake: Fake, folder: Path, run: Run) -> None:
    (line,) = lines(run("all/r.png", "--json", "--logits", "--top-k", "1")[1])
    assert line["logits"] == [25.5, 0.0, 0.0, 0.0] and len(line["predictions"]) == 1


def test_arguments_reach_load(fake: Fake, folder: Path, run: Run) -> None:
    run("all/r.png")
    progress = fake.asked.pop("progress")
    assert callable(progress)
    assert fake.asked == {
        "source": DEFAULT_MODEL, "device": "auto", "dtype": "auto", "batch_size": None,
        "revision": None, "labels": None, "tf32": True, "sparse": "auto", "passes": "all",
        "decode": "auto",
    }  # fmt: skip
    run("--model", "o/m", "--device=gpu:1", "--dtype", "float16", "all/r.png", "--revision", "v1",
        "--labels", "l.txt", "--batch-size", "3", "--no-tf32", "--sparse=never",
        "--passes=-stem,-qkv", "--decode=fast")  # fmt: skip
    fake.asked.pop("progress")
    assert fake.asked == {
        "source": "o/m", "device": "gpu:1", "dtype": "float16", "batch_size": 3, "revision": "v1",
        "labels": "l.txt",
        "tf32": False, "sparse": "never", "passes": "-stem,-qkv", "decode": "fast",
    }  # fmt: skip


def test_batches(fake: Fake, folder: Path, run: Run) -> None:
    images = ["all/r.png"] * 7
    assert run(*images, "--batch-size", "3", "--json")[0] == 0
    assert fake.batches == [3, 3, 1]
    fake.batches.clear()
    fake.batch_size = 32
    run(*images * 5, "--json")
    assert fake.batches == [32, 3]


def test_each_batch_is_flushed(
    fake: Fake, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    flushed = 0

    class Stream(io.StringIO):
        def flush(self) -> None:
            nonlocal flushed
            flushed = self.getvalue().count("\n")

    monkeypatch.setattr(sys, "stdout", Stream())
    fake.spoil = lambda _: seen.append(flushed)
    run_graph.main(["all/r.png"] * 30 + ["--batch-size", "1", "--json"])
    assert len(seen) == 30 and seen[0] == 0 and flushed == 30
    assert all(i - 4 <= count <= i for i, count in enumerate(seen)), "what runs is three ahead"


def test_answers_in_a_file(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("all", "text.jpg", "--output", "a.jsonl", "--top-k", "1")
    assert (code, out) == (1, "") and "1 of 4 images failed; a.jsonl says why" in err
    assert "error: text.jpg" not in err, "it is in the file"
    printed = run("all", "text.jpg", "--json", "--top-k", "1")[1]
    assert (folder / "a.jsonl").read_text() == printed and len(lines(printed)) == 4
    code, _, err = run("all", "--output", "a.jsonl")
    assert code == 2 and "the file exists already; continue it with --resume" in err


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_an_interrupted_run_goes_on(
    fake: Fake, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    images = [f"{i}.png" for i in range(20)]
    for image in images:
        (folder / image).write_bytes((folder / "all/r.png").read_bytes())
    options = [*NAMED, "--batch-size", "2", "--output"]
    assert run(*images, *options, f"whole{name}")[0] == 0

    def spoil(_: np.ndarray) -> None:
        if len(fake.batches) == 16:
            raise KeyboardInterrupt

    fake.spoil = spoil
    code, _, err = run(*images, *options, name)
    where = rf"after (\d+) of 20 images, the last one (\d+)\.png; --resume goes on with {name}"
    said = re.fullmatch(rf"interrupted {where}\n", err)
    assert code == 130 and said and int(said[1]) == int(said[2]) + 1 == 10
    fake.batches.clear()
    code, _, err = run(*images, *options, name, "--resume")
    assert code == 0 and fake.batches == [2] * 5 and "10 images in " in err
    assert (folder / name).read_text() == (folder / f"whole{name}").read_text()
    code, _, err = run(*images, *options, name, "--resume")
    assert code == 0 and f"nothing is left to do: {name} holds every answer\n" in err


def test_timing(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("all/r.png", "--timing", *NAMED)
    parts = r"imports [\d.]+ s, weights 0\.25 s, graph 1\.50 s, first run 0\.0\d s"
    said = rf"first answer after [\d.]+ s: {parts}"
    assert (code, err) == (0, "") and re.fullmatch(said, out.splitlines()[-1]), out
    assert re.search(said, run("all/r.png", "--timing", "--json")[2])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="NO /dev/full to write to")
def test_a_full_disk(fake: Fake, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "full.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(cli.results, "check", lambda *_: None)
    code, _, err = run("all", "--output", "full.jsonl")
    assert code == 2 and "writing failed (No space left on device); free some space, then" in err


def test_standard_input(
    fake: Fake, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(data: bytes) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return lines(run("-", "--json")[1])

    (line,) = feed((folder / "all/r.png").read_bytes())
    assert line["image"] == "-" and line["predictions"][0]["class_id"] == 0
    assert feed(b"")[0]["error"].startswith("-: ") and "empty" in feed(b"")[0]["error"]
    monkeypatch.setattr(sys, "stdin", None)
    assert "no image comes on standard input" in lines(run("-", "--json")[1])[0]["error"]


def test_folders_are_read_in_name_order(fake: Fake, tmp_path: Path, run: Run) -> None:
    names = ["a/z.png", "a/b/1.png", "a-b.png", "a.png", "B.png", "b/.git/x.png", "b/c.Tiff"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    got = [Path(line["image"]) for line in lines(run(str(tmp_path), "--json")[1])]
    assert [str(path.relative_to(tmp_path)) for path in got] == [
        "B.png", "a/b/1.png", "a/z.png", "a-b.png", "a.png", "b/c.Tiff",
    ]  # fmt: skip


def test_file_names_of_any_bytes(fake: Fake, folder: Path, run: Run) -> None:
    name = os.fsdecode(b"caf\xe9 \x1b[31m\t.png")
    try:
        (folder / name).write_bytes((folder / "all/r.png").read_bytes())
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    (line,) = lines(run(name, "--json")[1])
    assert line["image"] == "caf\\udce9 \x1b[31m\t.png"
    for arguments in ([name], [name, name], [name + "missing"]):
        out = "".join(map(str, run(*arguments)))
        assert "caf\\udce9 \\x1b[31m\\t.png" in out and "\x1b" not in out


# --- failures ---------------------------------------------------------------------------------


def test_images_that_fail_do_not_stop_the_others(fake: Fake, folder: Path, run: Run) -> None:
    code, out, err = run("missing.png", "all/r.png", "text.jpg", "all/g.JPG")
    assert code == 1 and fake.batches == [2, 2]
    assert [line.split("  ")[0] for line in out.splitlines()[:2]] == ["all/r.png", "all/g.JPG"]
    assert "error: missing.png: there is no such file; check the path" in err
    assert "error: text.jpg: " in err and "2 of 4 images failed" in err


def test_all_images_fail(fake: Fake, folder: Path, run: Run) -> None:
    (folder / "none").mkdir()
    code, out, err = run("missing.png")
    assert (code, out) == (1, "") and "no such file" in err
    code, out, err = run("missing.png", "none", "--json")
    assert [line["image"] for line in lines(out)] == ["missing.png", "none"] and not err
    code, out, err = run("missing.png", "--output", "a.csv")
    assert (code, out) == (1, "") and "no such file" in err and not (folder / "a.csv").exists()
    assert not fake.asked, "a model may take half a minute to compile"
    code, out, err = run("text.jpg")
    assert code == 1 and "this is text and not a" in err and fake.batches == []
    assert out.strip() == "fake on cpu, float32"
    code, _, err = run("none")
    assert code == 1 and "none: the folder holds no images" in err


def test_a_folder_is_read_but_for_what_is_no_file(fake: Fake, folder: Path, run: Run) -> None:
    """A pipe that nobody writes to would hang; a link is followed, and told if it leads nowhere."""
    os.mkfifo(folder / "all/pipe.png")
    (folder / "all/link.png").symlink_to("r.png")
    (folder / "all/lost.png").symlink_to("nothing.png")
    code, out, err = run("all", *NAMED)
    assert code == 1 and "lost.png: there is no such file" in err
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names[:4] == ["all/g.JPG", "all/link.png", "all/r.png", "all/sub/b.webp"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("https://example.org/cat.jpg", "URLs are not fetched; pipe the picture in: curl -s URL |"),
        ("", "an empty name is no file"),
    ],
)
def test_what_is_no_path(fake: Fake, run: Run, name: str, said: str) -> None:
    code, _, err = run(name, *NAMED)
    assert code == 1 and err.startswith(f"error: {name}: {said}") and not fake.asked


def test_an_empty_model_is_not_the_default(fake: Fake, folder: Path, run: Run) -> None:
    run("all/r.png", "--model", "")
    assert fake.asked["source"] == ""


def test_logits_that_are_not_finite(fake: Fake, folder: Path, run: Run) -> None:
    def spoil(logits: np.ndarray) -> None:
        logits[1, 0] = np.nan

    fake.spoil = spoil
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, _ = run("all", "--json")
    good, bad, other = lines(out)
    assert code == 1 and "predictions" in good and "predictions" in other
    assert (
        "fake gave NaN or infinity in float32" in bad["error"] and "--dtype float32" in bad["error"]
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "name an image, a folder or -; try"),
        (["x.png", "--top-k", "0"], "--top-k takes a whole number from 1 to 999999, not '0'"),
        (["x.png", "--top-k", "-1"], "--top-k"),
        (["x.png", "--batch-size", "many"], "--batch-size takes a whole number"),
        (["x.png", "--dtype", "int3"], "--dtype: 'int3' is none of .*float32"),
        (["x.png", "--device", "tpu"], "--device takes auto, cpu, gpu or gpu:N, not 'tpu'"),
        (["x.png", "--device", "gpu:x"], "--device takes .*'gpu:x'"),
        (["x.png", "--logits"], "--logits needs --json or an"),
        (["-", "-"], "- may come once only"),
        (["x.png", "--jso"], "there is no option --jso; did you mean --json"),
        (["x.png", "--topk", "3"], "there is no option --topk; did you mean --top-k"),
        (["x.png", "--output", "a.txt"], "ends in .csv, .jsonl or .parquet, not 'a.txt'"),
        (["x.png", "--output", "a.csv", "--json"], "--json does not go with --output"),
        (["x.png", "--output", "a.csv", "--logits"], "--logits needs --json or an --output"),
        (["x.png", "--resume"], "--resume needs --output"),
        (["x.png", "--output", "none/a.csv"], "its folder does not exist; choose another place"),
    ],
)
def test_wrong_arguments(fake: Fake, run: Run, arguments: list[str], match: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and re.search(match, err)
    assert not fake.asked


@pytest.mark.parametrize("error", [ModelError("m: no model"), DeviceError("gpu: none")])
def test_wrong_model_or_device(
    run: Run, fake: Fake, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(runtime, "load", load, raising=False)
    assert run("all/r.png", "--json") == (2, "", f"error: {error}\n")


def test_internal_error(
    run: Run, fake: Fake, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(_: np.ndarray) -> None:
        raise RuntimeError("out of memory\nand much more")

    fake.spoil = spoil
    code, out, err = run("all/r.png", *NAMED)
    assert (code, out) == (2, "")
    assert err == "error: internal error: RuntimeError: out of memory; --debug shows where\n"
    assert run_graph.main(["all/r.png", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(run: Run, fake: Fake, folder: Path) -> None:
    def spoil(_: np.ndarray) -> None:
        raise KeyboardInterrupt

    fake.spoil = spoil
    assert run("all/r.png", *NAMED) == (130, "", "")


def test_progress_is_shown_on_a_terminal_only(
    fake: Fake, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "classifying" not in run("all", "--json")[2]
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert run_graph.main(["all", "--json", "--batch-size", "2"]) == 0
    shown = terminal.getvalue()
    assert f"loading {DEFAULT_MODEL}" in shown
    assert "classifying 2 of 3" in shown and "classifying 3 of 3" in shown


def test_a_pipe_hears_that_the_model_compiles(fake: Fake, folder: Path, run: Run) -> None:
    fake.compiles = True
    code, out, err = run("all/r.png", "--json")
    assert code == 0 and len(lines(out)) == 1 and err.startswith("compiling fake\n")


def test_list_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Row:
        name: str
        family: str
        parameters: int
        flops: float
        top1: float | None

    ours = Row("resnet-small", "resnet", 550_000, 8.1e7, 0.91)
    theirs = Row("microsoft/resnet-50", "resnet", 25_557_032, 4.09e9, None)
    monkeypatch.setattr(models, "bundled", lambda: [ours])
    monkeypatch.setattr(models, "packaged", lambda: [])
    monkeypatch.setattr(models, "HUB", [theirs])
    code, out, err = run("--list-models")
    assert (code, err) == (0, "")
    for part in (
        "resnet-small",
        "550 k",
        "81 M",
        "91.0%",
        "microsoft/resnet-50",
        "25.6 M",
        "4.09 G",
    ):
        assert part in out
    small, large = lines(run("--list-models", "--json")[1])
    assert small["bundled"] and not large["bundled"] and large["parameters"] == 25_557_032


def test_times_have_three_digits() -> None:
    assert [cli._ms(s) for s in (0, 2e-6, 0.001234, 0.0128, 0.345678, 12.3456)] == [
        "0.0000 ms", "0.0020 ms", "1.23 ms", "12.8 ms", "346 ms", "12,346 ms",
    ]  # fmt: skip


# --- the real program -------------------------------------------------------------------------


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "run_graph.py"), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, **options)
    assert b"Traceback" not in done.stderr + done.stdout, done.stderr.decode()
    return done


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["x", "--top-k", "0"]])
def test_nothing_heavy_is_imported_to_answer(arguments: Sequence[str]) -> None:
    code = (
        "import sys\nfrom maxvision import run_graph\n"
        f"try: run_graph.main({list(arguments)})\n"
        "except SystemExit: pass\n"
        "heavy = {'max', 'numpy', 'PIL', 'rich', 'maxvision.weights', 'maxvision.graphs'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("option", ["--json", "--output=answers.csv"])
def test_no_framework_is_imported_to_classify(tmp_path: Path, option: str) -> None:
    code = (
        "import sys\nfrom maxvision import run_graph\n"
        f"run_graph.main([{str(ROOT / 'examples' / 'cat.jpg')!r}, {option!r}])\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'safetensors', 'pyarrow'}\n"
        "sys.exit(f'imported {found}' if (found := heavy & set(sys.modules)) else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_version_and_help() -> None:
    version = program("--version")
    assert version.returncode == 0 and version.stdout.startswith(b"maxvision ")
    text = program("--help").stdout.decode()
    for part in ("examples:", "exit codes:", "--list-models", "microsoft/resnet-50"):
        assert part in text


def test_version_is_that_of_the_project() -> None:
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("there is no pyproject.toml yet")
    text = project.read_text()
    assert f'version = "{run_graph.__version__}"' in text or 'dynamic = ["version"]' in text


PIPED = """
import sys, types, numpy
from maxvision import run_graph, runtime
sys.path.insert(0, {tests!r})
from tests.commands.test_run_graph import Fake
runtime.load = lambda *_, **__: Fake()
sys.exit(run_graph.main(sys.argv[1:]))
"""


@pytest.fixture
def piped(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the program with the stand-in on ever so many images."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        code = PIPED.format(tests=str(ROOT))
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    code,
                    *["all/r.png"] * 20_000,
                    *NAMED,
                    "--batch-size=1",
                    *options,
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&`
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_leaves(
    piped: Callable[..., subprocess.Popen[bytes]], options: Sequence[str]
) -> None:
    process = piped(*options)
    assert process.stdout and process.stderr
    assert b"r.png" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""


def test_control_c(piped: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = piped("--json")
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = rb"interrupted after [\d,]+ of 20,000 images, the last one all/r\.png\n"
    assert re.fullmatch(said, err), err


# --- the real program with the real model -----------------------------------------------------

EXAMPLES = sorted((ROOT / "examples").glob("*.jpg"))
BUNDLED = sorted((ROOT / "weights" / "bundled").glob("*/model.safetensors"))
real = pytest.mark.skipif(
    not (EXAMPLES and BUNDLED),
    reason="THE REAL PROGRAM WAS NOT RUN: examples/*.jpg or the bundled models are not here",
)


@real
def test_the_default_model_answers_for_the_examples_and_a_missing_file() -> None:
    done = program(*map(str, EXAMPLES), "missing.jpg", "--json", "--logits", "--device", "cpu")
    assert done.returncode == 1, done.stderr.decode()
    *good, missing = lines(done.stdout.decode())
    assert [line["image"] for line in good] == [str(path) for path in EXAMPLES]
    for line in good:
        scores = [prediction["score"] for prediction in line["predictions"]]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert line["predictions"][0]["class_id"] == int(np.argmax(line["logits"]))
    assert "no such file" in missing["error"]
    best = {Path(line["image"]).stem: line["predictions"][0]["label"] for line in good}
    assert best["coffee"] == "espresso" and best["cat"] in ("tabby", "tiger cat", "Egyptian cat")


@real
def test_standard_input_and_a_folder_as_text() -> None:
    done = program("-", str(EXAMPLES[0].parent), input=EXAMPLES[0].read_bytes())
    assert done.returncode == 0, done.stderr.decode()
    out = done.stdout.decode().splitlines()
    assert out[0].startswith("-  ") and str(EXAMPLES[0]) in out[1]
    assert re.search(r" on (cpu|gpu:0), \w+; preprocessing .*; warm run", out[-1])


@real
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--model", "/nonexistent"], b"/nonexistent: "),
        (["--model", "no-such-model"], b"no-such-model: "),
        (["--device", "gpu:99"], b"gpu"),
        (["--device", "cpu", "--dtype", "float16"], b"float16"),
    ],
)
def test_wrong_model_device_or_dtype(arguments: list[str], match: bytes) -> None:
    done = program(str(EXAMPLES[0]), *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ") and match in done.stderr


@real
def test_gpu_without_one() -> None:
    if not subprocess.run(["sh", "-c", "command -v nvidia-smi rocm-smi"], check=False).returncode:
        pytest.skip("this machine seems to have a GPU")
    done = program(str(EXAMPLES[0]), "--device", "gpu")
    assert done.returncode == 2 and b"gpu" in done.stderr.lower()
