"""KServe's protocol over gRPC: what Triton's client gets, and what it is refused."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("httpx")
grpc = pytest.importorskip("grpc", reason="pip install '.[grpc]'")

from maxvision.serve.proto import INFERENCE, Protocol  # noqa: E402
from maxvision.serve.rpc import CALLS  # noqa: E402
from tests.serve import faulty  # noqa: E402
from tests.serve.conftest import EXAMPLES, IMAGES, KEY, MODEL  # noqa: E402
from tests.serve.dialects import MODEL as NAME  # noqa: E402
from tests.serve.dialects import TOP  # noqa: E402
from tests.serve.started import ROOT, Server, children, picture, serving  # noqa: E402
from tests.serve.test_dialects import CAT, LABELS, pixels  # noqa: E402
from tests.serve.test_start import refuses  # noqa: E402

BODY = 300_000
BEARER = (("authorization", f"Bearer {KEY}"),)
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = [
        *MODEL, "--grpc-port=0", "--front-processes=2", f"--max-images-per-request={IMAGES}",
        f"--max-queue-size={IMAGES}", f"--max-body-bytes={BODY}", "--no-embeddings",
        "--model-control-mode=explicit",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("grpc") / "log"
    with serving(argv, log, KEY, MAXVISION_API_KEY=KEY) as started:
        started.until(lambda: "gRPC (KServe v2) at port" in log.read_text(), "port", 10)
        yield started


@pytest.fixture(scope="module")
def address(server: Server) -> str:
    found = re.search(r"gRPC \(KServe v2\) at port (\d+)", server.log.read_text())
    assert found
    return f"127.0.0.1:{found[1]}"


@pytest.fixture(scope="module")
def ask(address: str) -> Iterator[Ask]:
    """Calls by our own description, with the key unless other metadata are given."""
    with grpc.insecure_channel(address) as channel:

        def call(name: str, /, metadata: Any = BEARER, **fields: Any) -> Any:
            asked, answered = INFERENCE.calls[name]
            path = f"/{INFERENCE.service}/{name}"
            stub = channel.unary_unary(path, asked.SerializeToString, answered.FromString)
            return stub(asked(**fields), metadata=metadata, timeout=60)

        yield call


@pytest.fixture(scope="module")
def triton(address: str) -> Iterator[tuple[Any, Any]]:
    module = pytest.importorskip("tritonclient.grpc", reason="pip install 'tritonclient[grpc]'")
    with module.InferenceServerClient(address) as client:
        yield module, client


HEADERS = dict(BEARER)


def refused(call: Callable[[], Any], code: str, says: str) -> Any:
    """Expects a status and a sentence; gives the trailing metadata."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code().name == code, caught.value
    assert says in caught.value.details()
    return dict(caught.value.trailing_metadata())


def infer(ask: Ask, *files: bytes, **fields: Any) -> Any:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(files)]}
    contents = {"bytes_contents": list(files)}
    given = {"model_name": NAME, "inputs": [{**tensor, "contents": contents}], **fields}
    return ask("ModelInfer", **given)


def check(probabilities: np.ndarray, expected: list[list[dict]]) -> None:
    for row, predictions in zip(probabilities, expected, strict=True):
        order = np.argsort(-row)[:TOP]
        assert [LABELS[i] for i in order] == [each["label"] for each in predictions]
        assert row[order] == pytest.approx([each["score"] for each in predictions], rel=1e-5)


# --- the description --------------------------------------------------------------------------


def repeats(field: Any) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)  # protobuf 5


def same(ours: Any, theirs: Any) -> None:
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        kinds = [(each.number, each.type, repeats(each)) for each in (field, other)]
        assert kinds[0] == kinds[1], f"{ours.full_name}.{field.name}"
        assert (field.containing_oneof is None) == (other.containing_oneof is None)
        if field.message_type is not None:
            same(field.message_type, other.message_type)
        for value in field.enum_type.values if field.enum_type is not None else ():
            assert value.number == other.enum_type.values_by_name[value.name].number


def test_messages_are_tritons() -> None:
    """Names, numbers and types, so that what we write its clients read."""
    module = pytest.importorskip(
        "tritonclient.grpc.service_pb2", reason="pip install 'tritonclient[grpc]'"
    )
    assert set(INFERENCE.calls) == set(CALLS)
    service = module.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert INFERENCE.service == service.full_name
    for name, (asked, answered) in INFERENCE.calls.items():
        same(asked.DESCRIPTOR, service.methods_by_name[name].input_type)
        same(answered.DESCRIPTOR, service.methods_by_name[name].output_type)


def test_a_description_is_read() -> None:
    made = Protocol(
        """syntax = "proto3";  // a comment
        package p;
        service S { rpc Do(A) returns (B); }
        message A { enum E { X = 0; Y = 3; } map<string, B> all = 1; repeated E some = 2; }
        message B { oneof one { int64 n = 4; bytes data = 5; } }"""
    )
    asked, answered = made.calls["Do"]
    assert made.service == "p.S"
    sent = asked(all={"k": answered(n=7)}, some=["Y"])
    read = asked.FromString(sent.SerializeToString())
    assert (read.all["k"].n, list(read.some)) == (7, [3])
    assert answered(data=b"x").WhichOneof("one") == "data"


# --- Triton's client --------------------------------------------------------------------------


def test_tritonclient_describes(triton: Any) -> None:
    _, client = triton
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(NAME, headers=HEADERS)
    assert "statistics" in client.get_server_metadata(headers=HEADERS).extensions
    described = client.get_model_metadata(NAME, headers=HEADERS)
    assert [(each.name, list(each.shape)) for each in described.inputs] == [
        ("image", [-1, 1]), ("pixels", [-1, 128, 128, 3]),
    ]  # fmt: skip
    config = client.get_model_config(NAME, headers=HEADERS, as_json=True)["config"]
    assert (config["name"], config["backend"]) == (NAME, "max")
    assert config["input"][1]["format"] == "FORMAT_NHWC" and config["input"][1]["optional"]
    (row,) = client.get_model_repository_index(headers=HEADERS).models
    assert (row.name, row.state) == (NAME, "READY")


def test_tritonclient_sends_files_and_pixels(triton: Any, expected: list[list[dict]]) -> None:
    module, client = triton
    files = np.array([path.read_bytes() for path in EXAMPLES], dtype=np.object_)
    levels = np.stack([pixels(path) for path in EXAMPLES])
    before = statistics(client)
    for name, batch, wanted in (
        ("image", files, expected),
        ("pixels", levels[:1], expected[:1]),
        ("pixels", levels[1:2], expected[1:2]),
    ):
        tensor = module.InferInput(name, batch.shape, "BYTES" if name == "image" else "UINT8")
        tensor.set_data_from_numpy(batch)
        made = client.infer(NAME, [tensor], request_id="7", headers=HEADERS)
        assert made.get_response().id == "7"
        assert made.as_numpy("logits").shape == (len(batch), len(LABELS))
        check(made.as_numpy("probabilities"), wanted)
    classes = module.InferRequestedOutput("probabilities", class_count=2)
    image = module.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(files[:1])
    named = client.infer(NAME, [image], outputs=[classes], headers=HEADERS)
    assert named.as_numpy("probabilities").shape == (1, 2)
    assert named.as_numpy("probabilities")[0][0].decode().endswith(expected[0][0]["label"])
    after = statistics(client)
    assert after["inference_count"] - before["inference_count"] == len(files) + 3
    assert after["success"] - before["success"] == 4


def test_the_documents_client(
    triton: Any, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in docs/serving.md, with this server's address and key."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```\n", (ROOT / "docs/serving.md").read_text(), re.M | re.S
    )
    for shown, here in ("localhost:8001", address), ("outputs=", f"headers={HEADERS}, outputs="):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    monkeypatch.chdir(ROOT)
    exec(compile(code, "serving.md", "exec"), {})
    assert re.search(r":3:cat\b", capsys.readouterr().out)


def statistics(client: Any) -> dict[str, int]:
    (made,) = client.get_inference_statistics(NAME, headers=HEADERS).model_stats
    return {
        "inference_count": made.inference_count,
        "success": made.inference_stats.success.count,
    }


def test_tritonclient_unloads_and_loads(triton: Any, server: Server) -> None:
    _, client = triton
    client.unload_model(NAME, headers=HEADERS)
    assert not client.is_model_ready(NAME, headers=HEADERS) and not client.is_server_ready()
    client.load_model(NAME, headers=HEADERS)
    server.until(lambda: client.is_server_ready(), "readiness", 10)  # every front hears of it


# --- what is refused --------------------------------------------------------------------------


def test_contents_may_be_typed(ask: Ask, expected: list[list[dict]]) -> None:
    levels = pixels(EXAMPLES[0])
    for datatype, field in (("UINT8", "uint_contents"), ("FP32", "fp32_contents")):
        tensor = {"name": "pixels", "datatype": datatype, "shape": [1, *levels.shape]}
        contents = {field: levels.ravel().tolist()}
        made = ask("ModelInfer", model_name=NAME, inputs=[{**tensor, "contents": contents}])
        row = np.frombuffer(made.raw_output_contents[1], "<f4")
        check(row.reshape(1, -1), expected[:1])
    assert [each.datatype for each in infer(ask, CAT).outputs] == ["FP32", "FP32"]


def test_refusals_have_fitting_statuses(ask: Ask) -> None:
    files = {"name": "image", "datatype": "BYTES", "shape": [1]}
    typed = {"contents": {"bytes_contents": [CAT]}}
    wrong = [
        ({"inputs": []}, "there are 0; send one"),
        ({"inputs": [{**files, "name": "other", **typed}]}, "'other'"),
        ({"inputs": [{**files, "shape": [2], **typed}]}, "2 files"),
        ({"inputs": [files], "raw_input_contents": [b"\xff\xff\xff\xff1"]}, "cut off"),
        ({"inputs": [{**files, **typed}], "raw_input_contents": [b""]}, "more than once"),
        ({"inputs": [{**files, **typed}], "outputs": [{"name": "other"}]}, "logits or prob"),
        ({"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [1, 128, 128, 3],
                      "contents": {"uint_contents": [256] * 128 * 128 * 3}}]}, "0 to 255"),
    ]  # fmt: skip
    for fields, says in wrong:
        told = refused(lambda f=fields: infer(ask, **f), "INVALID_ARGUMENT", says)
        assert re.fullmatch("[0-9a-f]{32}", told["x-request-id"])
    negative = {"name": "logits", "parameters": {"classification": {"int64_param": -1}}}
    refused(lambda: infer(ask, CAT, outputs=[negative]), "INVALID_ARGUMENT", "at least 0")
    refused(lambda: infer(ask, b"no picture"), "INVALID_ARGUMENT", "this is text")
    refused(
        lambda: infer(ask, *[picture((9, 9, 9))] * (IMAGES + 1)),
        "INVALID_ARGUMENT",
        f"at most {IMAGES}",
    )
    refused(lambda: infer(ask, CAT, model_name="other"), "NOT_FOUND", "no model 'other'")
    refused(lambda: infer(ask, CAT, model_version="2"), "NOT_FOUND", "version 1")
    refused(lambda: ask("ModelConfig", name="other"), "NOT_FOUND", "no model 'other'")
    refused(lambda: infer(ask, picture(faulty.RAISE)), "INTERNAL", "failed on this image")
    refused(lambda: infer(ask, bytes(BODY)), "RESOURCE_EXHAUSTED", "larger than max")
    assert infer(ask, CAT).model_name == NAME


def test_bytes_that_are_no_message(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for name, code in (
            ("ModelInfer", "INVALID_ARGUMENT"),
            ("ServerLive", "INVALID_ARGUMENT"),
            ("ModelStreamInfer", "UNIMPLEMENTED"),
        ):
            call = channel.unary_unary(f"/{INFERENCE.service}/{name}")
            refused(lambda c=call: c(b"\xff" * 99, metadata=BEARER, timeout=30), code, "")
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while connection.recv(4096):
            pass  # it closes


def test_the_key_guards_all_but_the_probes(ask: Ask) -> None:
    assert ask("ServerLive", metadata=()).live and ask("ServerReady", metadata=()).ready
    for metadata in ((), (("authorization", "Bearer x"),), (("x-api-key", "x"),)):
        for name in set(INFERENCE.calls) - {"ServerLive", "ServerReady"}:
            refused(lambda n=name, m=metadata: ask(n, metadata=m), "UNAUTHENTICATED", "API key")
    assert ask("ServerMetadata", metadata=(("x-api-key", KEY),)).name == "maxvision"


def test_too_much_is_refused(ask: Ask, server: Server) -> None:
    slow = [picture(faulty.SLOW)] * (IMAGES // 2)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(infer, ask, *slow) for _ in range(8)]
        errors = [call.exception() for call in calls]
    codes = {error.code().name for error in errors if error is not None}  # type: ignore[attr-defined]
    assert codes == {"RESOURCE_EXHAUSTED"} and None in errors
    told = dict(next(e for e in errors if e).trailing_metadata())  # type: ignore[union-attr, attr-defined]
    assert told["retry-after"] == "1"
    server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "the end of all", 10)


def test_calls_are_logged_and_counted(ask: Ask, server: Server) -> None:
    before = server.metric('maxvision_requests_total{status="200"}')
    infer(ask, CAT)
    line = (
        rf"POST /{INFERENCE.service}/ModelInfer HTTP/2\" 200 \d+ ms=[\d.]+ id=\w+ images=1 model="
    )
    server.until(lambda: re.search(line, server.log.read_text()), "a line", 5)
    assert server.metric('maxvision_requests_total{status="200"}') > before
    assert server.metric("maxvision_rejected_total", "invalid_image") >= 1


def test_a_call_that_is_given_up_costs_no_place(ask: Ask, server: Server, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        asked, _ = INFERENCE.calls["ModelInfer"]
        call = channel.unary_unary(f"/{INFERENCE.service}/ModelInfer", asked.SerializeToString)
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
        contents = {"bytes_contents": [picture(faulty.SLOW)]}
        request = asked(model_name=NAME, inputs=[{**tensor, "contents": contents}])

        def given_up() -> bool:
            """A server that gets no core for a while answers before it sees that nobody waits."""
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                call(request, metadata=BEARER, timeout=0.2)
            server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "the end", 10)
            return " 499 0 ms=" in server.log.read_text()

        server.until(given_up, "a line", 30)
    assert infer(ask, CAT).model_name == NAME


def test_a_worker_that_ends_is_unavailable_for_a_while(ask: Ask, server: Server) -> None:
    told = refused(lambda: infer(ask, picture(faulty.EXIT)), "UNAVAILABLE", "try again later")
    assert int(told["retry-after"]) >= 1
    assert not ask("ServerReady", metadata=()).ready
    server.until(lambda: ask("ServerReady", metadata=()).ready, "readiness")
    assert infer(ask, CAT).model_name == NAME


def test_a_port_that_is_taken_is_told(address: str) -> None:
    """Also by another server's gRPC, which would share it."""
    port = address.partition(":")[2]
    argv = ["--model=resnet-cifar10", "--device=cpu", "--port=0", f"--grpc-port={port}"]
    refuses("serve", argv, f"--grpc-port {port}: port {port} of 127.0.0.1 is in use; choose")


def test_sigterm_lets_calls_end(ask: Ask, server: Server) -> None:
    """The last one: it ends the server."""
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(infer, ask, picture(faulty.SLOW)) for _ in range(2)]
        server.until(lambda: server.metric("maxvision_images_in_flight") == 2, "slow calls")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        assert [call.result().model_name for call in slow] == [NAME, NAME]
        refused(lambda: infer(ask, CAT), "UNAVAILABLE", "")
    assert server.process.wait(30) == 0
    assert not children(server.process.pid, "maxvision.serve.front")
