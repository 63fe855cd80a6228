"""A server as its clients see it: real HTTP, the bundled model on the CPU."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from maxvision.serve.errors import Refusal  # noqa: E402
from maxvision.serve.limits import Admission  # noqa: E402
from tests.serve import faulty  # noqa: E402
from tests.serve.conftest import BATCH, BODY, EXAMPLES, IMAGES, KEY, QUEUE  # noqa: E402
from tests.serve.started import ROOT, Server, picture  # noqa: E402

CAT = (ROOT / "examples/cat.jpg").read_bytes()
JPEG = {"Content-Type": "image/jpeg"}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def same(answer: httpx.Response, expected: list[dict]) -> None:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list"
    assert body["model"] == "resnet-cifar10"
    assert [item["index"] for item in body["data"]] == list(range(len(expected)))
    for item, predictions in zip(body["data"], expected, strict=True):
        for ours, theirs in zip(item["predictions"], predictions, strict=True):
            assert (ours["label"], ours["class_id"]) == (theirs["label"], theirs["class_id"])
            assert ours["score"] == pytest.approx(theirs["score"], rel=1e-5)
    assert body["usage"]["total_ms"] >= body["usage"]["inference_ms"] > 0


def refused(answer: httpx.Response, status: int, code: str, says: str = "") -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "request_id"}
    assert error["code"] == code
    assert error["request_id"] == answer.headers["x-request-id"]
    assert says in error["message"]
    for leak in ("Traceback", ".py", str(ROOT), "/tmp", "0x"):
        assert leak not in answer.text + str(answer.headers)
    return error


# --- answers ----------------------------------------------------------------------------------


def test_bytes_json_and_forms_give_what_run_graph_gives(
    server: Server, expected: list[dict]
) -> None:
    files = [path.read_bytes() for path in EXAMPLES]
    for data, predictions in zip(files, expected, strict=True):
        same(server.client.post("/v1/classify", content=data, headers=JPEG), [predictions])
    urls = [f"data:image/jpeg;base64,{b64(files[0])}", *map(b64, files[1:])]
    same(server.client.post("/v1/classify", json={"images": urls}), expected)
    form = [("images", (path.name, path.read_bytes(), "image/jpeg")) for path in EXAMPLES]
    same(server.client.post("/v1/classify", files=form), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_other_formats_are_read(server: Server, kind: str) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(CAT)).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    headers = {"Content-Type": f"image/{kind.lower()}"}
    answer = server.client.post("/v1/classify", content=file.getvalue(), headers=headers)
    assert answer.json()["data"][0]["predictions"][0]["label"] == "cat"


def test_options_are_taken_in_every_form(server: Server) -> None:
    asked = {"top_k": 2, "function_to_apply": "none", "model": "resnet-cifar10"}
    answers = [
        server.client.post("/v1/classify", content=CAT, headers=JPEG, params=asked),
        server.client.post("/v1/classify", json={"images": [b64(CAT)], **asked}),
        server.client.post("/v1/classify", files={"file": CAT}, data=asked),
    ]
    data = [answer.json()["data"] for answer in answers]
    assert data[0] == data[1] == data[2]
    assert len(data[0][0]["predictions"]) == 2
    assert data[0][0]["predictions"][0]["score"] > 1  # a logit
    asked = {"images": [b64(CAT)], "top_k": 99, "function_to_apply": "sigmoid"}
    best = server.client.post("/v1/classify", json=asked).json()["data"][0]["predictions"]
    assert len(best) == 10
    logit = data[0][0]["predictions"][0]["score"]
    assert best[0]["score"] == pytest.approx(1 / (1 + np.exp(-logit)))


def test_embeddings_are_the_features(server: Server) -> None:
    from maxvision.runtime import classifier

    model = classifier.load("resnet-cifar10", device="cpu")
    wanted = model.features(model.preprocess(CAT)[None]).features[0]
    url = f"data:image/jpeg;base64,{b64(CAT)}"
    answer = server.client.post("/v1/embeddings", json={"input": url, "model": "resnet-cifar10"})
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(answer.json()["data"][0]["embedding"], wanted, rtol=1e-5, atol=1e-6)
    asked = {"input": [url, url], "encoding_format": "base64"}
    data = server.client.post("/v1/embeddings", json=asked).json()["data"]
    assert [item["index"] for item in data] == [0, 1]
    read = np.frombuffer(base64.b64decode(data[1]["embedding"]), "<f4")
    np.testing.assert_allclose(read, wanted, rtol=1e-5, atol=1e-6)


def test_the_client_of_openai_gets_embeddings(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    url = f"data:image/jpeg;base64,{b64(CAT)}"
    wanted = server.client.post("/v1/embeddings", json={"input": url}).json()["data"][0]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        made = client.embeddings.create(model="resnet-cifar10", input=[url, url])
        for each in made.data:  # which comes as base64
            assert each.embedding == pytest.approx(wanted["embedding"], rel=1e-5)
        with pytest.raises(openai.NotFoundError, match="resnet-cifar10"):
            client.embeddings.create(model="other", input=url)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        stranger.models.list()


def test_models_versions_and_description(server: Server) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["resnet-cifar10"]
    assert server.client.get("/v1/models/resnet-cifar10").json() == listed[0]
    refused(server.client.get("/v1/models/other"), 404, "model_not_found")
    assert server.client.get("/version").json()["device"] == "cpu"
    described = server.client.get("/openapi.json").json()
    bodies = described["paths"]["/v1/classify"]["post"]["requestBody"]["content"]
    assert {"application/json", "multipart/form-data", "image/jpeg"} <= set(bodies)
    assert described["paths"]["/v1/classify"]["post"]["security"] == [{"key": []}]
    assert "/v1/classify" not in server.client.get("/docs").text  # it reads the description
    assert server.client.get("/docs").status_code == 200


# --- batches ----------------------------------------------------------------------------------


def test_images_of_several_clients_run_together(server: Server) -> None:
    before = server.metric("maxvision_batch_size_sum")
    with ThreadPoolExecutor(BATCH) as pool:
        answers = list(pool.map(lambda _: classify(server, CAT), range(BATCH)))
    assert max(answer.json()["usage"]["batch"] for answer in answers) > 1
    assert server.metric("maxvision_batch_size_sum") - before > BATCH
    assert server.metric("maxvision_images_total") >= BATCH
    for name in ("queue", "decode", "inference", "total"):
        assert server.metric(f"maxvision_{name}_seconds_count") > 0
    assert server.metric("maxvision_images_in_flight") == 0


def test_a_full_batch_does_not_wait(server: Server) -> None:
    answer = server.client.post("/v1/classify", json={"images": [b64(CAT)] * BATCH})
    assert answer.json()["usage"]["batch"] == BATCH
    assert answer.json()["usage"]["queue_ms"] < 90


def classify(server: Server, data: bytes, **options: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "image/png"}
    return httpx.post(
        f"{server.url}/v1/classify", content=data, headers=headers, timeout=30, params=options
    )


@pytest.mark.parametrize("fault", [faulty.RAISE, faulty.NAN], ids=["raises", "gives NaN"])
def test_an_image_that_fails_fails_alone(server: Server, fault: tuple[int, int, int]) -> None:
    with ThreadPoolExecutor(3) as pool:
        pictures = [CAT, picture(fault), CAT]
        first, bad, last = pool.map(lambda data: classify(server, data), pictures)
    assert first.status_code == last.status_code == 200
    error = refused(bad, 500, "inference_failed")
    assert error["request_id"] in server.log.read_text()


def test_a_short_memory_halves_the_batch(server: Server) -> None:
    images = [b64(picture(faulty.MEMORY))] * BATCH
    answer = server.client.post("/v1/classify", json={"images": images})
    assert answer.status_code == 200
    assert answer.json()["usage"]["batch"] == 2
    assert server.metric("maxvision_batch_limit") == 2


def test_a_client_that_leaves_costs_no_run(server: Server) -> None:
    colour = (9, 8, 7)
    log: Path = server.batches  # type: ignore[attr-defined]
    slow = threading.Thread(target=classify, args=(server, picture(faulty.SLOW)))
    slow.start()
    server.until(lambda: "1/2/4" in log.read_text(), "slow run")
    with pytest.raises(httpx.ReadTimeout):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "image/png"}
        url = f"{server.url}/v1/classify"
        httpx.post(url, content=picture(colour), headers=headers, timeout=0.15)
    slow.join()
    assert classify(server, CAT).status_code == 200
    assert "9/8/7" not in log.read_text()
    assert server.metric("maxvision_images_in_flight") == 0


# --- refusals ---------------------------------------------------------------------------------


def bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "status", "code", "says"),
    [
        (b"", 400, "invalid_image", "empty"),
        (b"hello", 400, "invalid_image", "this is text"),
        (b"%PDF-1.7", 400, "invalid_image", "a PDF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), 400, "invalid_image", "damaged"),
        (CAT[: len(CAT) // 2], 400, "invalid_image", "cut off or damaged"),
        (b"II*\0" + bytes(40), 400, "invalid_image", "cut off or damaged"),
        (bomb(), 413, "image_too_large", "1,500,000 pixels"),
        (bytes(BODY + 1), 413, "body_too_large", "2,000,000 bytes"),
    ],
    ids=["empty", "text", "pdf", "header", "truncated", "tiff", "bomb", "body"],
)
def test_bytes_that_are_no_picture(
    server: Server, data: bytes, status: int, code: str, says: str
) -> None:
    answer = server.client.post("/v1/classify", content=data, headers=JPEG)
    refused(answer, status, code, says)


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ("{", 400, "invalid_json", "JSON"),
        ("[]", 400, "invalid_request", "object"),
        ("{}", 400, "invalid_request", "images"),
        ('{"images": []}', 400, "invalid_request", "images"),
        ('{"images": [7]}', 400, "invalid_request", "images.0"),
        ('{"images": "x"}', 400, "invalid_request", "images"),
        ('{"images": ["!"]}', 400, "invalid_image", "base64"),
        ('{"images": ["file:///etc/passwd"]}', 400, "url_not_allowed", "URL"),
        ('{"images": ["http://127.0.0.1/a.png"]}', 400, "url_not_allowed", "URL"),
        ('{"images": ["data:text/html;base64,AAAA"]}', 400, "invalid_image", "data: URL"),
        ('{"images": ["aGk="], "top_k": 0}', 400, "invalid_request", "top_k"),
        ('{"images": ["aGk="], "function_to_apply": "x"}', 400, "invalid_request", "softmax"),
        ('{"images": ["aGk="], "topk": 1}', 400, "invalid_request", "topk"),
        ('{"images": ["aGk="], "model": "x"}', 404, "model_not_found", "resnet-cifar10"),
        (
            json.dumps({"images": ["aGk="] * (IMAGES + 1)}),
            413,
            "too_many_images",
            "9 images but may have at most 8;",
        ),
    ],
)
def test_json_that_is_not_right(
    server: Server, body: str, status: int, code: str, says: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.client.post("/v1/classify", content=body, headers=headers)
    refused(answer, status, code, says)


def test_forms_that_are_not_right(server: Server) -> None:
    form = [("images", CAT)] * (IMAGES + 1)
    refused(server.client.post("/v1/classify", files=form), 413, "too_many_images")
    refused(server.client.post("/v1/classify", data={"a": "b"}, files={}), 415,
            "content_type_not_supported")  # fmt: skip
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--y", b"--x\r\nContent-Disposition: form-data\r\n\r\n"):
        answer = server.client.post("/v1/classify", content=body, headers=headers)
        assert answer.status_code == 400, answer.text


def test_headers_that_are_not_right(server: Server) -> None:
    post = server.client.post
    wrong = post("/v1/classify", content=CAT, headers={"Content-Type": "text/plain"})
    refused(wrong, 415, "content_type_not_supported", "the Content-Type is 'text/plain'; set")
    packed = post("/v1/classify", content=CAT, headers={**JPEG, "Content-Encoding": "gzip"})
    refused(packed, 415, "encoding_not_supported", "send it without Content-Encoding")
    refused(server.client.get("/v1/classify"), 405, "method_not_allowed")
    refused(server.client.get("/nothing"), 404, "not_found")
    chunks = (bytes(100_000) for _ in range(BODY // 100_000 + 5))
    refused(post("/v1/classify", content=chunks, headers=JPEG), 413, "body_too_large")


def test_a_body_that_does_not_come_ends(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Content-Type: image/jpeg\r\nContent-Length: 1000\r\n\r\nhalf"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_bodies_are_bounded_together() -> None:
    bodies = Admission(10)
    with bodies.take(8), pytest.raises(Refusal, match="try again later"):
        bodies.check(3)
    assert bodies.held == 0


def test_the_key_guards_all_but_the_probes(server: Server) -> None:
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/health").status_code == stranger.get("/ready").status_code == 200
        assert stranger.get("/ping").json() == {"status": "Healthy"}
        for path in ("/v2/health/live", "/v2/health/ready", "/", "/docs", "/page/index.js"):
            assert stranger.get(path).status_code == 200  # a page asks for the key itself
        assert stranger.post("/v2/repository/index").status_code == 401
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/version"):
            refused(stranger.get(path), 401, "invalid_api_key")
        for path in ("/", "/models/resnet-cifar10", "/v2/models/resnet-cifar10/infer"):
            assert stranger.post(path, content=CAT).status_code == 401
        assert stranger.post("/classify", json={"input": b64(CAT)}).status_code == 401
        answer = stranger.post("/v1/classify", content=CAT, headers=JPEG)
        refused(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        refused(stranger.get("/v1/models", headers={"Authorization": "Bearer x"}), 401,
                "invalid_api_key")  # fmt: skip
        assert stranger.get("/v1/models", headers={"X-API-Key": KEY}).status_code == 200


def test_too_much_is_refused_at_once(server: Server) -> None:
    images = [b64(picture(faulty.SLOW))] * (IMAGES // 2)
    with ThreadPoolExecutor(8) as pool:
        url, headers = f"{server.url}/v1/classify", {"Authorization": f"Bearer {KEY}"}
        posts = [
            pool.submit(httpx.post, url, json={"images": images}, headers=headers, timeout=30)
            for _ in range(8)
        ]
        answers = [post.result() for post in posts]
    busy = [answer for answer in answers if answer.status_code == 429]
    assert len(busy) == 8 - QUEUE // len(images)
    for answer in busy:
        refused(answer, 429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.elapsed.total_seconds() < faulty.SLOW_SECONDS
    assert sum(answer.status_code == 200 for answer in answers) == QUEUE // len(images)
    assert server.metric('maxvision_rejected_total{reason="queue_full"}') >= len(busy)
    assert classify(server, CAT).status_code == 200


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "crashes", "hangs", "breaks"])
def test_a_worker_is_started_anew(server: Server, fault: str) -> None:
    begun = time.monotonic()
    starts = server.metric("maxvision_worker_starts")
    if fault == "killed":
        os.kill(server.worker(), signal.SIGKILL)
        server.until(lambda: not server.ready(), "unreadiness", 10)
    else:
        colours = {"crashes": faulty.EXIT, "hangs": faulty.HANG, "breaks": faulty.BREAK}
        data = picture(colours[fault])
        answer = classify(server, data)
        refused(answer, 503, "not_ready")
        assert "retry-after" in answer.headers
    refused(server.client.get("/ready"), 503, "not_ready")
    refused(server.client.get("/ping"), 503, "not_ready")
    (row,) = server.client.post("/v2/repository/index").json()
    assert row["state"] == "UNAVAILABLE"
    assert server.client.post("/v2/repository/index", json={"ready": True}).json() == []
    assert server.client.get("/health").status_code == 200
    refused(classify(server, CAT), 503, "not_ready")
    server.until(server.ready, "readiness", 30)
    took = time.monotonic() - begun
    assert classify(server, CAT).status_code == 200
    assert server.metric("maxvision_worker_starts") == starts + 1
    assert took < 30, f"{took:.1f} s"  # 10 s on a machine that does nothing else


def half_poison() -> bytes:
    """Makes a picture that no other test has sent, whose corner ends the process."""
    file = io.BytesIO()
    image = Image.new("RGB", (128, 128), faulty.EXIT)
    image.paste((200, 10, 10), (64, 64, 128, 128))
    image.save(file, "PNG")
    return file.getvalue()


def test_an_image_that_ends_the_process_twice_is_not_run_again(server: Server) -> None:
    poison = half_poison()
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            bad, other = pool.map(lambda data: classify(server, data), [poison, CAT])
        refused(bad, 503, "not_ready")
        assert other.status_code in (200, 503)  # innocent, and perhaps in the same batch
        server.until(server.ready, "readiness", 30)
    starts = server.metric("maxvision_worker_starts")
    refused(classify(server, poison), 500, "quarantined")
    assert classify(server, CAT).status_code == 200
    assert server.ready()
    assert server.metric("maxvision_worker_starts") == starts


def test_sigterm_lets_requests_end(server: Server) -> None:
    """The last one: it ends the server."""
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(classify, server, picture(faulty.SLOW)) for _ in range(2)]
        server.until(lambda: server.metric("maxvision_images_in_flight") == 2, "slow requests")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: not server.ready(), "unreadiness", 5)
        refused(classify(server, CAT), 503, "ending")
        assert [answer.result().status_code for answer in slow] == [200, 200]
    assert server.process.wait(20) == 0
    assert "never retrieved" not in server.log.read_text()
