"""KServe's V2 protocol, however it travels: what models are, tensors in, tensors out.

A model has two inputs, of which a request gives one: ``image``, files as BYTES [N], or ``pixels``,
UINT8 or FP32 [N, H, W, 3], as the model takes them. Its outputs are ``logits`` and
``probabilities``, FP32 [N, classes]. ``routes/kserve.py`` speaks HTTP, ``rpc.py`` gRPC.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np

from maxvision.serve.answers import Function, rank, score
from maxvision.serve.core import Card, Image, Service
from maxvision.serve.errors import Refusal
from maxvision.serve.limits import too_many_images
from maxvision.serve.models import Models

VERSION = "1"
PLATFORM = "max"
OUTPUTS: dict[str, Function] = {"logits": "none", "probabilities": "softmax"}
MOST_OUTPUTS = 4
EXTENSIONS = (
    "classification",
    "binary_tensor_data",
    "model_repository",
    "model_configuration",
    "statistics",
)
_TYPES = {"UINT8": "<u1", "FP32": "<f4"}


class InputParameters(msgspec.Struct, frozen=True):
    """What is said of an input; other parameters are skipped, here and below."""

    binary_data_size: int | None = None


class InputTensor(msgspec.Struct):
    """A tensor of a request; ``data`` stays text until its shape is known to be right."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(msgspec.Struct, frozen=True):
    """How an output is wanted: as bytes, and with how many classes by name, 0 for none."""

    binary_data: bool | None = None
    classification: Annotated[int, msgspec.Meta(ge=0)] = 0


class OutputTensor(msgspec.Struct):
    """What is asked of an output."""

    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(msgspec.Struct, frozen=True):
    """How all outputs are wanted."""

    binary_data_output: bool = False


class InferRequest(msgspec.Struct):
    """A request, or its part that is JSON."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: RequestParameters = RequestParameters()
    outputs: list[OutputTensor] = []


def described() -> dict[str, Any]:
    """Names the server and the extensions of the protocol that it speaks."""
    return {"name": "maxvision", "version": VERSION, "extensions": list(EXTENSIONS)}


def metadata(service: Service) -> dict[str, Any]:
    """Names a model's inputs and outputs, with their shapes."""
    classes = len(service.card.labels)
    return {
        "name": service.card.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1, 1]},
            {"name": "pixels", "datatype": "UINT8", "shape": [-1, *_picture(service.card)]},
        ],
        "outputs": [{"name": n, "datatype": "FP32", "shape": [-1, classes]} for n in OUTPUTS],
    }


def check_version(version: str) -> None:
    """Compares the version that a request names.

    Raises:
        Refusal: 404, if it is another.
    """
    if version != VERSION:
        raise Refusal(404, "model_not_found", f"version {VERSION} is served here, no other")


def row(service: Service) -> dict[str, str]:
    """Makes a model's row of the index."""
    made = {"name": service.card.name, "version": VERSION, "state": "READY", "reason": ""}
    if service.ready:
        return made
    reason = "the model is being made ready, or the server ends" if service.loaded else "unloaded"
    return made | {"state": "UNAVAILABLE", "reason": reason}


async def change(models: Models, model: str, loaded: bool) -> None:
    """Loads or unloads a model.

    Raises:
        Refusal: 400, if clients may not do that; 404 if there is no such model; 503 if it cannot be
            loaded.
    """
    models.find(model)
    if models.change is None:
        raise wrong(
            f"the model {model} is loaded as long as this server runs; start it with"
            " --model-control-mode explicit to load and unload models"
        )
    await models.change(model, loaded)


def _picture(card: Card) -> tuple[int, int, int]:
    return card.preprocess.height, card.preprocess.width, 3


def wrong(message: str) -> Refusal:
    """Says what a request has wrong."""
    return Refusal(400, "invalid_request", message)


# --- what Triton's clients ask of a model ---------------------------------------------------


def config(service: Service) -> dict[str, Any]:
    """Gives a model's configuration in the form of Triton's ``config.pbtxt``.

    ``dims`` leave the batch out. A request gives one of the inputs, so both are optional.
    """
    card, options = service.card, service.options
    inputs = [
        _tensor("image", "TYPE_STRING", [1], format="FORMAT_NONE", optional=True),
        _tensor("pixels", "TYPE_UINT8", list(_picture(card)), format="FORMAT_NHWC", optional=True),
    ]
    kind, _, number = card.device.partition(":")
    count = len(service.instances.members)
    group = {"name": card.name, "kind": f"KIND_{kind.upper()}", "count": count}
    return {
        "name": card.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": options.max_images_per_request,
        "input": inputs,
        "output": [_tensor(name, "TYPE_FP32", [len(card.labels)]) for name in OUTPUTS],
        "dynamic_batching": {
            "preferred_batch_size": [service.batch_limit],
            "max_queue_delay_microseconds": round(1e3 * options.max_batch_delay_ms),
        },
        "instance_group": [group | {"gpus": [int(number)] if number else []}],
    }


def _tensor(name: str, data_type: str, dims: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims, **more}


def statistics(service: Service) -> dict[str, Any]:
    """Counts what a model has done since the server started.

    ``success``, ``fail`` count requests; ``queue``, ``compute_input`` (decoding) and
    ``compute_infer`` images.
    """
    found = service.totals()

    def took(name: str) -> dict[str, int]:
        seconds = found.get(f"{name}_seconds_sum", 0.0)
        return {"count": round(found.get(f"{name}_seconds_count", 0)), "ns": round(1e9 * seconds)}

    nothing = {"count": 0, "ns": 0}  # a cache that is not there
    return {
        "name": service.card.name,
        "version": VERSION,
        "last_inference": round(1e3 * found.get("last_inference_timestamp_seconds", 0)),
        "inference_count": round(found.get("images_total", 0)),
        "execution_count": round(found.get("batches_total", 0)),
        "inference_stats": {
            "success": took("total"),
            "fail": took("failed"),
            "queue": took("queue"),
            "compute_input": took("decode"),
            "compute_infer": took("inference"),
            "compute_output": took("inference") | {"ns": 0},  # not measured apart
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],  # /metrics has the sizes
    }


# --- a tensor becomes images ------------------------------------------------------------------


def images_of(service: Service, tensor: InputTensor, data: bytes | None) -> list[Image]:
    """Reads the images of an input: from its bytes, or from its ``data`` as JSON.

    Raises:
        Refusal: 400, if it is no input of the model's or not right; 413 if it has too many images.
    """
    if tensor.name == "image" and tensor.datatype == "BYTES":
        return _files(tensor, data)
    if tensor.name == "pixels" and tensor.datatype in _TYPES:
        return _pixels(tensor, data, service)
    raise wrong(
        f"inputs: there is no {tensor.name[:40]!r} of the datatype {tensor.datatype[:40]!r}; send"
        " image as BYTES, or pixels as UINT8 or FP32"
    )


def _files(tensor: InputTensor, data: bytes | None) -> list[Image]:
    count = tensor.shape[0] if tensor.shape else 0
    if tensor.shape not in ([count], [count, 1]):
        raise wrong(f"image: shape must be [N] but is {_short(tensor.shape)}")
    files: list[Image]
    if data is not None:
        files = list(_split(data))
    else:
        texts = _decoded(tensor, list[str | tuple[str]], "a list of texts")
        files = [each if isinstance(each, str) else each[0] for each in texts]
    if len(files) != count:
        raise wrong(f"image: shape says {count} files but data has {len(files)}")
    return files


def _split(data: bytes) -> list[bytes]:
    """Splits BYTES that each have their length before them, as 4 bytes, the lowest first."""
    files, at = [], 0
    while at < len(data):
        end = at + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, at)[0]
        if end > len(data):
            raise wrong(
                "image: the data is cut off; send the length of each file before it, as 4 bytes"
            )
        files.append(data[at + 4 : end])
        at = end
    return files


def _pixels(tensor: InputTensor, data: bytes | None, service: Service) -> list[Image]:
    picture = _picture(service.card)
    limit = service.options.max_images_per_request
    if len(tensor.shape) != 4 or tuple(tensor.shape[1:]) != picture or tensor.shape[0] < 1:
        wanted = ", ".join(map(str, picture))
        raise wrong(f"pixels: shape must be [N, {wanted}] but is {_short(tensor.shape)}")
    if tensor.shape[0] > limit:
        raise too_many_images(tensor.shape[0], limit)
    count = math.prod(tensor.shape)
    kind = np.dtype(_TYPES[tensor.datatype])
    if data is not None:
        if len(data) != count * kind.itemsize:
            raise wrong(
                f"pixels: {len(data)} bytes came but {_short(tensor.shape)} of {tensor.datatype}"
                f" needs {count * kind.itemsize}"
            )
        values = np.frombuffer(data, kind)
    else:
        values = _numbers(tensor, count)
    if tensor.datatype == "FP32" or values.dtype != np.uint8:
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.uint8)
        if not np.array_equal(whole, values):
            raise wrong(
                "pixels: some values are not whole levels from 0 to 255; send them as they are"
                " decoded, because the model normalises them itself"
            )
        values = whole
    return list(values.reshape(tensor.shape))


def _numbers(tensor: InputTensor, count: int) -> np.ndarray:
    """Reads numbers, flat or nested, once their count is known to be right."""
    text = bytes(tensor.data)
    uncounted = wrong(f"pixels: data must have {count} numbers, as its shape says")
    if text.count(b",") != count - 1:
        raise uncounted
    try:
        values = np.asarray(_decoded(tensor, list[Any], "a list"))
    except (ValueError, OverflowError):
        raise uncounted from None
    if values.size != count or values.dtype.kind not in "iuf":
        raise uncounted
    if tensor.datatype == "UINT8" and values.dtype.kind == "f":
        raise wrong("pixels: the datatype is UINT8 but data has floats; send whole numbers")
    return values


def _decoded(tensor: InputTensor, kind: Any, called: str) -> Any:
    try:
        return msgspec.json.decode(bytes(tensor.data), type=kind)
    except (ValueError, RecursionError):
        raise wrong(f"{tensor.name}: data must be {called}") from None


def _short(shape: list[int]) -> str:
    return str(shape[:6])[:60]


# --- logits become outputs --------------------------------------------------------------------


class Output(msgspec.Struct):
    """A tensor of an answer: FP32 [N, classes], or BYTES [N, k], which are texts."""

    name: str
    datatype: str
    shape: list[int]
    values: Any

    def raw(self) -> bytes:
        """Gives the tensor as bytes; a text has its length before it, as 4 bytes."""
        if self.datatype == "BYTES":
            return joined(text.encode() for text in self.values)
        made: bytes = self.values.tobytes()
        return made


def check_outputs(wanted: list[OutputTensor]) -> None:
    """Looks whether outputs are there.

    Raises:
        Refusal: 400, if one is not, or too many are asked for.
    """
    if len(wanted) > MOST_OUTPUTS:
        raise wrong(f"outputs: {len(wanted)} are too many; ask for at most {MOST_OUTPUTS}")
    for each in wanted:
        if each.name not in OUTPUTS:
            raise wrong(f"outputs: there is no {each.name[:40]!r}; ask for logits or probabilities")


def outputs_of(card: Card, wanted: list[OutputTensor], logits: list[np.ndarray]) -> list[Output]:
    """Makes the outputs that are wanted, or all, of the logits [classes] of each image."""
    made = []
    for each in wanted or [OutputTensor(name) for name in OUTPUTS]:
        function, classes = OUTPUTS[each.name], each.parameters.classification
        if classes:
            texts = [
                f"{p.score:.6f}:{p.class_id}:{p.label}"
                for row in logits
                for p in rank(row, card.labels, classes, function)
            ]
            shape = [len(logits), min(classes, len(card.labels))]
            made.append(Output(each.name, "BYTES", shape, texts))
        else:
            values = np.stack([score(row, function) for row in logits]).astype("<f4")
            made.append(Output(each.name, "FP32", list(values.shape), values))
    return made


def joined(each: Iterable[bytes]) -> bytes:
    """Makes the bytes of BYTES: each has its length before it, as 4 bytes, the lowest first."""
    return b"".join(struct.pack("<I", len(data)) + data for data in each)
