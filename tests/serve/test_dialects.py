"""Every dialect gives what run_graph.py gives, and refuses in its own shape."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from maxvision.runtime.preprocess import Preprocess  # noqa: E402
from maxvision.serve.routes.common import EXAMPLE  # noqa: E402
from tests.serve.conftest import EXAMPLES, IMAGES  # noqa: E402
from tests.serve.dialects import LENGTH, MODEL, TOP, calls  # noqa: E402
from tests.serve.started import ROOT, Server, picture  # noqa: E402

CAT = (ROOT / "examples/cat.jpg").read_bytes()
CONFIG = json.loads((ROOT / "weights/bundled" / MODEL / "config.json").read_text())
LABELS = [label for _, label in sorted((int(i), v) for i, v in CONFIG["id2label"].items())]
INFER = f"/v2/models/{MODEL}/infer"
FILES = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [EXAMPLE]}


def refused(answer: httpx.Response, status: int, says: str) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) <= {"error", "estimated_time"}
    assert says in answer.json()["error"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("name", calls(b"", LABELS))
def test_all_give_what_run_graph_gives(plain: Server, expected: list[dict], name: str) -> None:
    for path, predictions in zip(EXAMPLES, expected, strict=True):
        call = calls(path.read_bytes(), LABELS)[name]
        answer = plain.client.post(call.path, content=call.body, headers=call.headers)
        assert answer.status_code == 200, answer.text
        got = call.read(answer.json())
        assert [label for label, _ in got] == [p["label"] for p in predictions]
        wanted = [p["score"] for p in predictions]
        tolerance = 10.0**-call.digits
        assert [score for _, score in got] == pytest.approx(wanted, rel=1e-5, abs=tolerance)


def test_the_description_has_examples_that_work(plain: Server) -> None:
    described = plain.client.get("/openapi.json").json()
    assert {"/", "/models/{model}", "/classify", "/v1/classify", "/v2/models/{model}/infer"} <= set(
        described["paths"]
    )
    sent = 0
    for path, operations in described["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content and path != "/v1/embeddings":  # which is off here
            example = content["application/json"]["example"]
            answer = plain.client.post(path.replace("{model}", MODEL), json=example)
            assert answer.status_code == 200, f"{path}: {answer.text}"
            sent += 1
    assert sent == 6


def test_the_commands_of_the_document_work(plain: Server) -> None:
    text = (ROOT / "docs/serving.md").read_text().partition("## Routes")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.S)
    assert block
    commands = re.split(r"^#.*\n|\n(?=curl|echo)", block[1], flags=re.M)
    commands = [each.replace("localhost:8000", plain.url) for each in commands if each.strip()]
    assert len(commands) == 5
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "error" not in json.loads(done.stdout)
        assert re.search(r"0\.9828\d+", done.stdout), command


def test_hugging_face_takes_its_parameters(plain: Server) -> None:
    asked = {"top_k": 2, "function_to_apply": "none"}
    content = {"inputs": [b64(CAT), EXAMPLE], "parameters": asked, "options": {"use_cache": False}}
    many = plain.client.post("/", json=content).json()
    assert [len(each) for each in many] == [2, 2]
    assert many[0][0]["label"] == "cat"
    assert many[0][0]["score"] > 1  # a logit
    curl = {"Content-Type": "application/x-www-form-urlencoded"}
    assert plain.client.post("/", content=CAT, headers=curl).json()[0]["label"] == "cat"


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        ({}, 400, "inputs"),
        ({"inputs": "!"}, 400, "base64"),
        ({"inputs": []}, 400, "the request has no image"),
        ({"inputs": EXAMPLE, "parameters": {"top_k": 0}}, 400, "top_k"),
        ({"inputs": EXAMPLE, "parameters": {"topk": 1}}, 400, "topk"),
        ({"inputs": [EXAMPLE] * (IMAGES + 1)}, 413, f"at most {IMAGES};"),
    ],
)
def test_hugging_face_refuses(plain: Server, content: Any, status: int, says: str) -> None:
    refused(plain.client.post("/", json=content), status, says)


def test_errors_have_the_shape_of_their_dialect(plain: Server) -> None:
    post = plain.client.post
    refused(post("/models/other", content=CAT), 404, MODEL)
    refused(post("/", content=CAT, headers={"Content-Type": "text/plain"}), 415, "Content-Type")
    refused(post("/v2/models/other/infer", json={}), 404, MODEL)
    refused(post("/v2"), 405, "/docs")
    answer = post("/classify", json={"model": "other", "input": EXAMPLE})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_route_that_is_not_there_is_no_model_that_is_not(plain: Server) -> None:
    ask = plain.client.request
    of_model = f"/v2/models/{MODEL}"
    for method, path in (
        ("GET", "/v2/nothing"),
        ("GET", f"{of_model}/nothing"),
        ("POST", f"{of_model}/generate"),
        ("GET", f"{of_model}/versions/1/trace/setting"),
        ("POST", f"/models/{MODEL}/nothing"),
        ("POST", "/v2/models/other"),
    ):
        refused(ask(method, path), 404, "there is no such route; /docs")
    answer = ask("GET", f"/v1/models/{MODEL}/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    for method, path, allowed in (
        ("GET", f"{of_model}/infer", "POST"),
        ("POST", f"{of_model}/ready", "GET"),
        ("PUT", of_model, "GET"),
    ):
        refused(ask(method, path), 405, "another method")
        assert ask(method, path).headers["allow"] == allowed
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/other/nothing"):
        refused(ask("GET", path), 404, MODEL)


# --- KServe -----------------------------------------------------------------------------------


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pixels(path: Path) -> np.ndarray:
    config = json.loads((ROOT / "weights/bundled" / MODEL / "preprocessor_config.json").read_text())
    return Preprocess.from_config(config)(path.read_bytes())


def infer(server: Server, head: dict, *tails: bytes) -> httpx.Response:
    """Sends JSON, or JSON and bytes behind it."""
    text = json.dumps(head).encode()
    headers = {LENGTH: str(len(text))} if tails else {"Content-Type": "application/json"}
    return server.client.post(INFER, content=b"".join([text, *tails]), headers=headers)


def outputs(answer: httpx.Response) -> dict[str, np.ndarray]:
    """Reads the FP32 outputs of an answer, from JSON or from the bytes behind it."""
    assert answer.status_code == 200, answer.text
    length = int(answer.headers.get(LENGTH, len(answer.content)))
    made, rest = json.loads(answer.content[:length]), answer.content[length:]
    assert (made["model_name"], made["model_version"]) == (MODEL, "1")
    read = {}
    for output in made["outputs"]:
        if "data" in output:
            values = np.float32(output["data"])
        else:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], "<f4"), rest[size:]
        read[output["name"]] = values.reshape(output["shape"])
    assert not rest
    return read


def test_kserve_describes_itself(plain: Server) -> None:
    get = plain.client.get
    assert {"classification", "binary_tensor_data"} <= set(get("/v2").json()["extensions"])
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    for path in (f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/versions/1"):
        described = get(path).json()
        assert described["name"] == MODEL
        assert [each["name"] for each in described["inputs"]] == ["image", "pixels"]
        assert described["outputs"][0]["shape"] == [-1, len(LABELS)]
        assert get(f"{path}/ready").json() == {"name": MODEL, "ready": True}
    refused(get(f"/v2/models/{MODEL}/versions/2"), 404, "version 1")


def test_triton_gives_a_configuration(plain: Server) -> None:
    get = plain.client.get
    made = get(f"/v2/models/{MODEL}/config").json()
    assert get(f"/v2/models/{MODEL}/versions/1/config").json() == made
    assert (made["name"], made["platform"], made["backend"]) == (MODEL, "max", "max")
    assert made["max_batch_size"] == IMAGES
    described = get(f"/v2/models/{MODEL}").json()
    types = {"TYPE_STRING": "BYTES", "TYPE_UINT8": "UINT8", "TYPE_FP32": "FP32"}
    for ours, theirs in (("input", "inputs"), ("output", "outputs")):
        for tensor, same in zip(made[ours], described[theirs], strict=True):
            assert (tensor["name"], types[tensor["data_type"]]) == (same["name"], same["datatype"])
            assert tensor["dims"] == same["shape"][1:]
    assert made["instance_group"][0]["kind"] == "KIND_CPU"
    assert made["dynamic_batching"]["preferred_batch_size"] == [8]
    refused(get("/v2/models/other/config"), 404, MODEL)
    refused(get(f"/v2/models/{MODEL}/versions/2/config"), 404, "version 1")


def statistics(server: Server, path: str = f"/v2/models/{MODEL}/stats") -> dict:
    answer = server.client.get(path)
    assert answer.status_code == 200, answer.text
    (made,) = answer.json()["model_stats"]
    assert (made["name"], made["version"]) == (MODEL, "1")
    return made


def test_triton_counts(plain: Server) -> None:
    before = statistics(plain)
    began = time.time()
    content = {"inputs": [b64(CAT)] * IMAGES}
    assert plain.client.post("/", json=content).status_code == 200
    assert plain.client.post("/", content=b"no picture").status_code == 400
    after = statistics(plain, "/v2/models/stats")
    assert statistics(plain, f"/v2/models/{MODEL}/versions/1/stats") == after
    assert after["inference_count"] - before["inference_count"] == IMAGES
    assert 1 <= after["execution_count"] - before["execution_count"] <= IMAGES
    assert began - 1 < after["last_inference"] / 1e3 < time.time() + 1
    requests = {"success": 1, "fail": 1}
    images = dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), IMAGES)
    nothing = dict.fromkeys(("cache_hit", "cache_miss"), 0)
    for phase, count in (requests | images | nothing).items():
        old, new = before["inference_stats"][phase], after["inference_stats"][phase]
        assert new["count"] - old["count"] == count, phase
        assert 0 <= new["ns"] - old["ns"] < 60e9
        assert (new["ns"] > old["ns"]) == (bool(count) and phase != "compute_output"), phase
    refused(plain.client.get("/v2/models/other/stats"), 404, MODEL)


def test_triton_lists_its_models(plain: Server) -> None:
    post = plain.client.post
    row = {"name": MODEL, "version": "1", "state": "READY", "reason": ""}
    for content in (b"", b"{}", b'{"ready": true}'):
        assert post("/v2/repository/index", content=content).json() == [row]
    refused(post("/v2/repository/index", content=b"{"), 400, "JSON")
    refused(post("/v2/repository/index", content=b'{"ready": 7}'), 400, ".ready")
    for what in ("load", "unload"):
        refused(post(f"/v2/repository/models/{MODEL}/{what}"), 400, "as long as this server runs")
        refused(post(f"/v2/repository/models/other/{what}"), 404, MODEL)


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
@pytest.mark.parametrize("form", ["flat", "nested", "bytes"])
def test_kserve_takes_pixels(plain: Server, expected: list[dict], datatype: str, form: str) -> None:
    batch = np.stack([pixels(path) for path in EXAMPLES])
    if datatype == "FP32":
        batch = batch.astype(np.float32)
    tensor: dict[str, Any] = {"name": "pixels", "shape": batch.shape, "datatype": datatype}
    tails = []
    if form == "bytes":
        tails = [batch.tobytes()]
        tensor["parameters"] = {"binary_data_size": batch.nbytes}
    else:
        tensor["data"] = (batch if form == "nested" else batch.ravel()).tolist()
    head = {"inputs": [tensor], "parameters": {"binary_data_output": form == "bytes"}}
    made = outputs(infer(plain, head, *tails))
    assert set(made) == {"logits", "probabilities"}
    powers = np.exp(np.float64(made["logits"]))
    np.testing.assert_allclose(
        made["probabilities"], powers / powers.sum(axis=1, keepdims=True), rtol=1e-5
    )
    for row, predictions in zip(made["probabilities"], expected, strict=True):
        order = np.argsort(-row)[:TOP]
        assert [LABELS[i] for i in order] == [p["label"] for p in predictions]
        assert row[order] == pytest.approx([p["score"] for p in predictions], rel=1e-5)


def test_kserve_takes_columns_of_files(plain: Server) -> None:
    column = FILES | {"shape": [2, 1], "data": [[b64(CAT)], [EXAMPLE]]}
    assert outputs(infer(plain, {"inputs": [column]}))["logits"].shape == (2, len(LABELS))


def test_triton_names_classes_in_bytes_too(plain: Server) -> None:
    asked = {"name": "probabilities", "parameters": {"classification": 2, "binary_data": True}}
    answer = infer(plain, {"inputs": [FILES | {"data": [b64(CAT)]}], "outputs": [asked], "id": "7"})
    length = int(answer.headers[LENGTH])
    made, rest = json.loads(answer.content[:length]), answer.content[length:]
    assert made["id"] == "7"
    assert made["outputs"][0]["shape"] == [1, 2]
    first = struct.unpack_from("<I", rest)[0]
    assert rest[4 : 4 + first] == b"0.982808:3:cat"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "other"}, "'other'"),
        ({"datatype": "INT64"}, "'INT64'"),
        ({"datatype": "UINT8"}, "image as BYTES"),
        ({"shape": [2]}, "2 files"),
        ({"shape": []}, "[N]"),
        ({"shape": ["x"]}, "int"),
        ({"data": [7]}, "texts"),
        ({"data": "x"}, "a list of texts"),
        ({"data": None}, "a list of texts"),
        ({"data": ["!"]}, "base64"),
        ({"data": ["file:///etc/passwd"]}, "URL"),
        ({"parameters": {"binary_data_size": 9}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": "x"}}, "binary_data_size"),
        ({"data": [[EXAMPLE, EXAMPLE]]}, "texts"),
        ({"data": [[]]}, "texts"),
    ],
)
def test_kserve_refuses_files(plain: Server, change: dict, says: str) -> None:
    refused(infer(plain, {"inputs": [FILES | change]}), 400, says)


PIXELS = {"name": "pixels", "shape": [1, 128, 128, 3], "datatype": "UINT8"}
COUNT = 128 * 128 * 3


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"shape": [1, 3, 128, 128]}, 400, "[N, 128, 128, 3]"),
        ({"shape": [0, 128, 128, 3]}, 400, "[N, 128, 128, 3]"),
        ({"shape": [10**9, 128, 128, 3]}, 413, f"at most {IMAGES};"),
        ({"data": [0] * 9}, 400, f"{COUNT} numbers"),
        ({"data": [[0] * 9, [0] * (COUNT - 9)]}, 400, f"{COUNT} numbers"),
        ({"data": ["0"] * COUNT}, 400, f"{COUNT} numbers"),
        ({"data": [10**30] * COUNT}, 400, f"{COUNT} numbers"),
        ({"data": [None] * COUNT}, 400, f"{COUNT} numbers"),
        ({"data": [0.5] * COUNT}, 400, "whole numbers"),
        ({"data": [-1] * COUNT}, 400, "0 to 255"),
        ({"data": [256] * COUNT}, 400, "0 to 255"),
        ({"data": [0.5] * COUNT, "datatype": "FP32"}, 400, "0 to 255"),
        ({"data": [1e30] * COUNT, "datatype": "FP32"}, 400, "0 to 255"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_kserve_refuses_pixels(plain: Server, change: dict, status: int, says: str) -> None:
    refused(infer(plain, {"inputs": [PIXELS | change]}), status, says)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ({"name": "other"}, "logits or probabilities"),
        ({"name": "logits", "parameters": {"classification": -1}}, ".classification"),
        ({"name": "logits", "parameters": {"binary_data": 1}}, ".binary_data"),
        ({"parameters": {}}, "name"),
    ],
)
def test_kserve_refuses_outputs(plain: Server, output: dict, says: str) -> None:
    refused(infer(plain, {"inputs": [FILES], "outputs": [output]}), 400, says)


def test_kserve_refuses_bytes_that_do_not_add_up(plain: Server) -> None:
    size = {"binary_data_size": 8}
    bytes_ = {"name": "image", "shape": [1], "datatype": "BYTES", "parameters": size}
    refused(infer(plain, {"inputs": [bytes_]}, b"\xff\xff\xff\xff1234"), 400, "length of each file")
    refused(infer(plain, {"inputs": [FILES]}, b"1234"), 400, "binary_data_size")
    refused(
        infer(plain, {"inputs": [PIXELS | {"parameters": size}]}, bytes(8)), 400, f"needs {COUNT}"
    )
    nan = np.full((1, 128, 128, 3), np.nan, "<f4")
    tensor = PIXELS | {"datatype": "FP32", "parameters": {"binary_data_size": nan.nbytes}}
    refused(infer(plain, {"inputs": [tensor]}, nan.tobytes()), 400, "0 to 255")
    many = {"inputs": [FILES], "outputs": [{"name": "logits"}] * 9}
    refused(infer(plain, many), 400, "at most 4")
    refused(infer(plain, {"inputs": [FILES] * 2}), 400, "there are 2; send one")
    for length in ("-1", "x", "99999999", "²", "9" * 5000):
        answer = plain.client.post(INFER, content=b"{}", headers={LENGTH: length.encode()})
        refused(answer, 400, "Inference-Header-Content-Length")
    deep = b'{"x":' * 100_000
    for body, says in (
        (b"", "JSON"),
        (b"{", "JSON"),
        (deep, "JSON"),
        (b"\xff", "JSON"),
        (b"[", ""),
    ):
        refused(plain.client.post(INFER, content=body), 400, says)


# --- vLLM -------------------------------------------------------------------------------------


def test_vllm_gives_every_probability(plain: Server) -> None:
    content = {"model": MODEL, "input": [b64(CAT), EXAMPLE], "user": "somebody"}
    answer = plain.client.post("/classify", json=content).json()
    assert answer["id"].startswith("classify-")
    assert [each["index"] for each in answer["data"]] == [0, 1]
    for each in answer["data"]:
        assert each["num_classes"] == len(each["probs"]) == len(LABELS)
        assert sum(each["probs"]) == pytest.approx(1)
        assert each["label"] == LABELS[int(np.argmax(each["probs"]))]
    content = {"input": picture_url(), "use_activation": False}
    logits = plain.client.post("/classify", json=content).json()["data"][0]["probs"]
    assert min(logits) < 0


def picture_url() -> str:
    return f"data:image/png;base64,{b64(picture((90, 120, 40)))}"
