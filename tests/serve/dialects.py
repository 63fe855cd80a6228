"""One picture asked for in every dialect: what to send, and the classes in what comes back."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "resnet-cifar10"
TOP = 5
JSON = "application/json"
LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Call:
    """A request, and how its answer is read.

    Attributes:
        path: Where it is posted.
        headers: Of the request.
        body: Of the request.
        read: Makes (label, score) of each class, the likeliest first, of the answer's JSON.
        digits: What the dialect rounds scores to.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    read: Callable[[Any], list[tuple[str, float]]]
    digits: int = 9


def calls(data: bytes, labels: Sequence[str]) -> dict[str, Call]:
    """Makes the request for a picture in each dialect, by its name."""
    text = base64.b64encode(data).decode()
    url = f"data:image/jpeg;base64,{text}"

    def posted(path: str, content: Any, read: Any, **more: Any) -> Call:
        return Call(path, {"Content-Type": JSON}, json.dumps(content).encode(), read, **more)

    def ours(answer: Any) -> list[tuple[str, float]]:
        return [(p["label"], p["score"]) for p in answer["data"][0]["predictions"]]

    def task(answer: Any) -> list[tuple[str, float]]:
        return [(p["label"], p["score"]) for p in answer]

    def ranked(probabilities: list[float]) -> list[tuple[str, float]]:
        pairs = zip(labels, probabilities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])[:TOP]

    def infer(**output: Any) -> dict[str, Any]:
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}
        return {"inputs": [tensor], "outputs": [{"name": "probabilities", **output}]}

    def classified(answer: Any) -> list[tuple[str, float]]:
        rows = [each.split(":") for each in answer["outputs"][0]["data"]]
        assert all(labels[int(index)] == label for _, index, label in rows)
        return [(label, float(score)) for score, _, label in rows]

    v2 = f"/v2/models/{MODEL}/infer"
    size = len(data) + 4
    head = json.dumps(
        {
            "inputs": [
                {"name": "image", "shape": [1], "datatype": "BYTES",
                 "parameters": {"binary_data_size": size}}
            ],
            "outputs": [{"name": "probabilities", "parameters": {"classification": TOP}}],
        }
    ).encode()  # fmt: skip
    return {
        "ours, bytes": Call("/v1/classify", {"Content-Type": "image/jpeg"}, data, ours),
        "ours, JSON": posted("/v1/classify", {"images": [url]}, ours),
        "Hugging Face, bytes": Call("/", {"Content-Type": "image/jpeg"}, data, task),
        "Hugging Face, JSON": posted(f"/models/{MODEL}", {"inputs": text}, task),
        "KServe, JSON": posted(v2, infer(), lambda a: ranked(a["outputs"][0]["data"])),
        "Triton, classes": posted(
            v2, infer(parameters={"classification": TOP}), classified, digits=6
        ),
        "Triton, bytes": Call(
            v2, {LENGTH: str(len(head))}, head + struct.pack("<I", len(data)) + data, classified,
            digits=6,
        ),
        "vLLM": posted(
            "/classify", {"model": MODEL, "input": url}, lambda a: ranked(a["data"][0]["probs"])
        ),
    }  # fmt: skip
