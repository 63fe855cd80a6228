"""Clients and tools that people have, as they come: each gives what run_graph.py gives."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from tests.serve.conftest import EXAMPLES
from tests.serve.dialects import MODEL, TOP
from tests.serve.started import Server
from tests.serve.test_dialects import CAT, LABELS, pixels

FILES = np.array([path.read_bytes() for path in EXAMPLES], dtype=np.object_)


@pytest.fixture
def triton(plain: Server) -> Any:
    """tritonclient's module for HTTP, and a client of it."""
    http = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
    with http.InferenceServerClient(plain.url.removeprefix("http://")) as client:
        yield http, client


def test_huggingface_hub(plain: Server, expected: list[list[dict]]) -> None:
    from huggingface_hub import InferenceClient

    path = EXAMPLES[0]
    for url in (plain.url, f"{plain.url}/models/{MODEL}"):
        got = InferenceClient(model=url).image_classification(str(path), top_k=3)
        assert [each.label for each in got] == [each["label"] for each in expected[0][:3]]


def test_openai(plain: Server) -> None:
    """Its embeddings are in test_server.py, whose server has them."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "maxvision"
        with pytest.raises(openai.NotFoundError, match=MODEL):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="--no-embeddings"):
            client.embeddings.create(model=MODEL, input=base64.b64encode(CAT).decode())


def test_tritonclient_describes(triton: Any) -> None:
    _, client = triton
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert "statistics" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata(MODEL)["outputs"][1]["name"] == "probabilities"
    assert client.get_model_config(MODEL, "1")["name"] == MODEL
    assert client.get_inference_statistics()["model_stats"][0]["name"] == MODEL
    assert client.get_inference_statistics(MODEL, "1")["model_stats"][0]["version"] == "1"
    assert client.get_model_repository_index()[0]["state"] == "READY"
    assert not client.is_model_ready("other")
    with pytest.raises(Exception, match="as long as this server runs"):
        client.load_model(MODEL)
    with pytest.raises(Exception, match="no such route"):
        client.get_trace_settings(MODEL)


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_sends_files(triton: Any, expected: list[list[dict]], binary: bool) -> None:
    """Each in a request of its own, and all together; tensors as bytes, and as JSON."""
    http, client = triton
    asked = [http.InferRequestedOutput(name, binary) for name in ("probabilities", "logits")]
    files = FILES if binary else np.array([base64.b64encode(each) for each in FILES])
    for batch in [*files.reshape(-1, 1), files]:
        image = http.InferInput("image", [len(batch)], "BYTES")
        image.set_data_from_numpy(batch.astype(np.object_), binary_data=binary)
        made = client.infer(MODEL, [image], outputs=asked)
        assert made.as_numpy("logits").shape == (len(batch), len(LABELS))
        wanted = expected if len(batch) > 1 else [expected[list(files).index(batch[0])]]
        check(made.as_numpy("probabilities"), wanted)


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_tritonclient_sends_pixels(triton: Any, expected: list[list[dict]], datatype: str) -> None:
    http, client = triton
    batch = np.stack([pixels(path) for path in EXAMPLES])
    tensor = http.InferInput("pixels", batch.shape, datatype)
    tensor.set_data_from_numpy(batch.astype({"UINT8": np.uint8, "FP32": np.float32}[datatype]))
    made = client.infer(MODEL, [tensor], request_id="7")  # both outputs, as bytes
    assert made.get_response()["id"] == "7"
    check(made.as_numpy("probabilities"), expected)
    classes = http.InferRequestedOutput("probabilities", class_count=2)
    named = client.infer(MODEL, [tensor], outputs=[classes]).as_numpy("probabilities")
    assert named.shape == (len(batch), 2)
    assert named[0][0].decode().endswith(f":{expected[0][0]['label']}")


def test_tritonclient_is_refused_in_a_sentence(triton: Any) -> None:
    http, client = triton
    image = http.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([b"no picture"], dtype=np.object_))
    with pytest.raises(http.InferenceServerException, match=r"\[400\] .*this is text"):
        client.infer(MODEL, [image])
    with pytest.raises(http.InferenceServerException, match=rf"\[404\] .*{MODEL}"):
        client.infer("other", [image])


def test_perf_analyzer(plain: Server, tmp_path: Path) -> None:
    """Triton's tool reads metadata, configuration and statistics, and drives the server."""
    tool = shutil.which("perf_analyzer")
    if tool is None:
        pytest.skip("NO perf_analyzer on the PATH; it comes with Triton's SDK")
    file = base64.b64encode(struct.pack("<I", len(CAT)) + CAT).decode()
    sent = tmp_path / "cat.json"
    sent.write_text(json.dumps({"data": [{"image": {"shape": [1], "content": {"b64": file}}}]}))
    address = plain.url.removeprefix("http://")
    command = [tool, "-m", MODEL, "-u", address, "--input-data", str(sent), "-p", "500", "-s", "90"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(r"Throughput: [1-9]", done.stdout), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def check(probabilities: np.ndarray, expected: list[list[dict]]) -> None:
    """Compares rows of probabilities with run_graph.py's predictions."""
    for row, predictions in zip(probabilities, expected, strict=True):
        order = np.argsort(-row)[:TOP]
        assert [LABELS[i] for i in order] == [each["label"] for each in predictions]
        assert row[order] == pytest.approx([each["score"] for each in predictions], rel=1e-5)
