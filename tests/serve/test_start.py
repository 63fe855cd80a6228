"""Starts: the plain line of MAX, and the mistakes of a user."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.errors import ArgumentError
from maxvision.serve.options import parse
from maxvision.serve.server import make_supervisors, read_card
from maxvision.serve.worker import end_with_parent
from tests.serve import faulty
from tests.serve.started import ROOT, children, picture, serving


def test_max_serve_serves(tmp_path: Path) -> None:
    argv = [
        str(Path(sys.executable).with_name("max")), "serve",
        "--custom-architectures", ".:maxvision.serve",
        "--model", "weights/bundled/resnet-cifar10", "--devices", "cpu", "--host", "127.0.0.1",
        "--port", "0", "--max-batch-size", "4",
    ]  # fmt: skip
    with serving(argv, tmp_path / "log", MAX_SERVE_DISABLE_TELEMETRY="1") as server:
        data = (ROOT / "examples/cat.jpg").read_bytes()
        headers = {"Content-Type": "image/jpeg"}
        answer = server.client.post("/v1/classify", content=data, headers=headers)
        assert answer.json()["data"][0]["predictions"][0]["label"] == "cat"
        assert answer.json()["model"] == "resnet-cifar10"
        assert server.metric("maxvision_batch_limit") == 4
        assert not has_torch(server.worker())
        assert server.stop() == 0


PNG = {"Content-Type": "image/png"}


NO_SECOND_GRAPH = {"MAXVISION_NO_EMBEDDINGS": "1"}
"""Spares the compilation of what tests/serve/test_server.py asks another model for."""


def has_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is read in /proc")
def test_a_server_without_options_says_what_it_serves_and_holds_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with serving(["-m", "serve", "--port", "0"], tmp_path / "log", **NO_SECOND_GRAPH) as server:
        first = server.log.read_text().partition("\n")[0]
        said = r"loading efficientnet-lite0, which knows 1,000 classes; http://\S+ answers 503"
        assert re.fullmatch(f"{said} until then", first)
        assert not has_torch(server.process.pid)
        assert not has_torch(server.worker())


def test_the_models_process_says_that_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    """Or the first start is silent for a minute."""
    _, supervisors = make_supervisors(parse(["--device", "cpu"]))
    (only,) = supervisors.members
    load = pickle.loads(pickle.dumps(only._spec.load))
    load.keywords["progress"]("compiling m")
    assert capsys.readouterr().err == "compiling m\n"


def test_torch_comes_back_for_whoever_needs_it() -> None:
    code = """if True:
        from importlib.util import find_spec
        from maxvision.serve import torchless
        torchless.hide()
        assert not find_spec("torch")
        torchless.show()
        assert find_spec("torch")
        """
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prot", "1"], "there is no option --prot; did you mean --port?"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "resnet-cifar10", "--port", "99999"], "from 0 to 65535"),
        (["--model", "resnet-cifar10", "--device", "tpu"], "auto, cpu, gpu or gpu:N"),
        (["--model", "resnet-cifar10", "--max-queue-size", "3"], "--max-images-per-request"),
        (["--model", "resnet-cifar10", "--allow-media-domain", "http://x"], "example.org"),
        (["--model", "resnet-cifar10", "--api-key", "a b"], "--api-key"),
    ],
)
def test_mistakes_are_told(argv: list[str], says: str) -> None:
    port = [] if "--port" in argv else ["--port=0"]
    refuses("serve", [*argv, *port], says, HF_HUB_OFFLINE="1")


def test_a_mistake_that_the_model_process_finds_is_told() -> None:
    argv = ["--model", "resnet-cifar10", "--device", "cpu", "--port", "0"]
    says = "the device is on holiday; wait"
    refuses("tests.serve.faulty", argv, says, FAULTY_START="1")


def test_a_dtype_that_the_device_lacks_is_told() -> None:
    argv = ["--model", "resnet-cifar10", "--device", "cpu", "--dtype", "float16", "--port", "0"]
    refuses("serve", argv, "dtype float16 runs on a GPU only")


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refuses("serve", ["--model", "resnet-cifar10", f"--port={port}"], "is in use; choose")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full to write to")
@pytest.mark.parametrize("fronts", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_full_disk_under_the_log_stops_nothing(fronts: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [
        "--model=resnet-cifar10",
        "--device=cpu",
        f"--port={port}",
        f"--front-processes={fronts}",
    ]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(
            [sys.executable, "-m", "tests.serve.faulty", *argv], cwd=ROOT, stdout=full, stderr=full
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):

        def status(colour: tuple[int, int, int]) -> int:
            return client.post("/v1/classify", content=picture(colour), headers=PNG).status_code

        def becomes(code: int) -> None:
            end = time.monotonic() + 90
            while True:
                with suppress(httpx.TransportError):  # it does not listen yet
                    if client.get("/ready").status_code == code:
                        return
                assert process.poll() is None
                assert time.monotonic() < end, f"/ready is never {code}"
                time.sleep(0.02)

        try:
            becomes(200)
            assert [status((9, 9, 9)), status(faulty.RAISE)] == [200, 500]
            os.kill(children(process.pid, "spawn_main")[0], signal.SIGKILL)
            becomes(503)
            becomes(200)
            assert status((9, 9, 9)) == 200
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("fronts", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_ctrl_c_while_it_starts_is_a_quiet_end(fronts: str) -> None:
    argv = [sys.executable, "-m", "serve", "--port=0", f"--front-processes={fronts}"]
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, **NO_SECOND_GRAPH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr and process.stderr.readline().startswith(
                b"loading efficientnet-lite0"
            )
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err.decode()) == (0, b"", "")


def refuses(module: str, argv: list[str], says: str, **environ: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *argv],
        cwd=ROOT, capture_output=True, text=True, timeout=90, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_options_come_from_the_environment_too() -> None:
    environ = {
        "MAXVISION_MODEL": "resnet-cifar10",
        "MAXVISION_MAX_BATCH_SIZE": "3",
        "MAXVISION_ALLOW_MEDIA_DOMAIN": "a.org,B.org",
        "MAXVISION_NO_TF32": "1",
    }
    options = parse(["--max-batch-size", "5"], environ)
    assert (options.model, options.max_batch_size) == ("resnet-cifar10", 5)
    assert options.allow_media_domain == ("a.org", "b.org")
    assert options.tf32 is False


def test_a_mistake_in_the_environment_names_the_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for argv in ([], ["--port", "1"]):
        with pytest.raises(SystemExit, match="2"):
            parse(argv, {"MAXVISION_PORT": "x"})
        assert "error: MAXVISION_PORT takes a whole number from 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse(["--port", "x"], {"MAXVISION_PORT": "1"})
    assert "error: --port takes a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize("environ", [{}, {"MAXVISION_MODEL": ""}])
def test_without_a_model_it_is_the_default_one(environ: dict[str, str]) -> None:
    assert parse([], environ).model == DEFAULT_MODEL
    assert parse(["--model", "m"], environ).model == "m"


def test_decoding_may_be_fast() -> None:
    argv = ["--model", "resnet-cifar10", "--device", "cpu"]
    assert read_card(parse([*argv, "--decode", "fast"], {})).preprocess.fast
    assert not read_card(parse(argv, {})).preprocess.fast


def test_debug_is_an_option_of_servers_too() -> None:
    assert parse([], {"MAXVISION_DEBUG": "1"}).debug and parse(["--debug"], {}).debug
    assert not parse([], {}).debug


def test_with_debug_a_mistake_is_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [f"--port={taken.getsockname()[1]}", "--debug"]
        done = subprocess.run(
            [sys.executable, "-m", "serve", *argv], cwd=ROOT, capture_output=True, text=True
        )
    assert done.returncode == 2 and done.stderr.startswith("Traceback"), done.stderr


def test_labels_in_place_of_the_models(tmp_path: Path) -> None:
    labels = [f"kind {i}" for i in range(10)]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    argv = ["--model", "resnet-cifar10", "--device", "cpu", "--labels"]
    assert read_card(parse([*argv, str(tmp_path / "labels.json")], {})).labels == labels
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    with pytest.raises(ArgumentError, match="there are 2 but resnet-cifar10 has 10 classes"):
        read_card(parse([*argv, str(tmp_path / "labels.txt")], {}))


SPAWN = multiprocessing.get_context("spawn")


def server_of(end: Connection) -> None:
    worker = SPAWN.Process(target=worker_of, args=(end,))
    worker.start()
    worker.join()


def worker_of(end: Connection) -> None:
    end_with_parent()
    end.send("started")
    lock = SPAWN.Lock()
    lock.acquire()
    lock.acquire()  # waits for ever, as for a server that was killed in a wait of its own


def test_a_process_ends_with_a_server_that_is_killed() -> None:
    ours, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=server_of, args=(theirs,))
    server.start()
    theirs.close()
    assert ours.recv() == "started"
    server.kill()
    assert ours.poll(10), "it goes on"
    with pytest.raises(EOFError):  # the last who could have sent something is gone
        ours.recv()
    server.join()
