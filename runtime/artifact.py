"""A model that was compiled ahead of time: a folder, which runs without the compiler.

| file                     | what it holds                                                       |
| ------------------------ | ------------------------------------------------------------------- |
| manifest.json            | format, target, dtype, sparse layers, versions; sums of the others   |
| graph.mef                | the compiled graph: uint8 pixels [N, H, W, C] to logits               |
| weights.safetensors      | its weights, arranged for the target                                |
| program.json             | the network as it was compiled (graphs/program.py)                  |
| config.json              | the labels, as on the Hugging Face hub                              |
| preprocessor_config.json | how an image is prepared, likewise                                  |
| resample.mef             | what prepares images that the GPU decodes (NVIDIA's alone)           |

The weights are mapped: a CPU computes on the file's own pages, so that a start reads nothing twice
and processes share them. Every file is compared with its sum in the manifest before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import __version__ as max_version

from maxvision.common.errors import ModelError
from maxvision.graphs.parameters import ALIGNMENT, Bound, buffer
from maxvision.graphs.program import Program
from maxvision.graphs.sparsity import Chosen
from maxvision.graphs.target import Target

FORMAT = "maxvision compiled model"
VERSION = 4
"""Rises when models of before name ops that are gone, as those of 3 may that are for Hopper."""
MANIFEST, GRAPH, WEIGHTS = "manifest.json", "graph.mef", "weights.safetensors"
PROGRAM, CONFIG, PREPROCESS = "program.json", "config.json", "preprocessor_config.json"
RESAMPLE = "resample.mef"

_CODES = {
    DType.float32: "F32",
    DType.float16: "F16",
    DType.bfloat16: "BF16",
    DType.int32: "I32",
    DType.uint32: "U32",
    DType.uint8: "U8",
    DType.int8: "I8",
    DType.float8_e4m3fn: "F8_E4M3",
}
_AGAIN = "compile it again with maxvision compile"


@dataclass(frozen=True)
class Package:
    """A model as its folder describes it.

    Attributes:
        folder: Where it is.
        name: What the model was called when it was compiled.
        program: The network as it was compiled.
        labels: The name of each class.
        preprocess: As in a ``preprocessor_config.json``.
        target: What it was compiled for.
        dtype: Of activations and filters.
        tf32: Whether its products of float32 are rounded to TF32 first.
        sparse: Which of its layers run as sparse convolutions.
        versions: Of what it was compiled with.
        files: Size in bytes and SHA-256 of every file but the manifest.
    """

    folder: Path
    name: str
    program: Program
    labels: list[str]
    preprocess: dict[str, Any]
    target: Target
    dtype: str
    tf32: bool
    sparse: Chosen
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]

    @property
    def family(self) -> str:
        """What its network is called."""
        return self.program.name

    @property
    def channels(self) -> int:
        """Channels of its images."""
        (pixels,) = self.program.inputs.values()
        return int(pixels.shape[-1])

    def load(self, device: Device) -> tuple[bytes, dict[str, Buffer]]:
        """Reads the compiled graph, and the weights on ``device``, for ``session.init``.

        Raises:
            ModelError: If a file is damaged.
        """
        from maxvision.weights.files import map_safetensors

        graph = self._checked(GRAPH)
        try:
            mapped, tensors = map_safetensors(self.folder / WEIGHTS)
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self.folder, f"{WEIGHTS} cannot be read ({error})") from None
        _compare(self.folder, WEIGHTS, self.files[WEIGHTS], mapped.data)
        return graph, {
            name: buffer(array, getattr(DType, dtype)).to(device)
            for name, (dtype, array) in tensors.items()
        }

    def resample(self) -> bytes | None:
        """Reads the graph of ``runtime.nvjpeg``, if there is one.

        Raises:
            ModelError: If the file is damaged.
        """
        return self._checked(RESAMPLE) if RESAMPLE in self.files else None

    def verify(self) -> None:
        """Compares every file with its sum.

        Raises:
            ModelError: If one is damaged.
        """
        for name in self.files:
            self._checked(name)

    def _checked(self, name: str) -> bytes:
        return _read(self.folder, name, self.files[name])


def is_here(source: str | os.PathLike[str]) -> bool:
    """Tells whether ``source`` is the folder of a compiled model, be it a damaged one."""
    folder = Path(source).expanduser()
    try:
        found = (folder / MANIFEST).read_bytes()
    except OSError:
        return (folder / GRAPH).is_file()
    return FORMAT.encode() in found or (folder / GRAPH).is_file()


def read(source: str | os.PathLike[str]) -> Package:
    """Reads the folder of a compiled model; graph and weights stay where they are.

    Raises:
        ModelError: If it is damaged, or compiled with another version of MAX.
    """
    folder = Path(source).expanduser()
    manifest = _manifest(folder)
    if manifest.get("version") != VERSION:
        raise ModelError(
            f"{folder}: this compiled model has format version {manifest.get('version')}, and"
            f" version {VERSION} is supported; {_AGAIN}"
        )
    try:
        versions = manifest["versions"]
        if versions["max"] != max_version:
            raise ModelError(
                f"{folder}: was compiled with MAX {versions['max']} but this is MAX {max_version};"
                f" {_AGAIN}, or pip install max=={versions['max']}"
            )
        files = {
            name: manifest["files"][name] for name in (GRAPH, WEIGHTS, PROGRAM, CONFIG, PREPROCESS)
        }
        if RESAMPLE in manifest["files"]:
            files[RESAMPLE] = manifest["files"][RESAMPLE]
        config, preprocess = (
            json.loads(_read(folder, name, files[name])) for name in (CONFIG, PREPROCESS)
        )
        labels = [config["id2label"][str(i)] for i in range(len(config["id2label"]))]
        target, sparse = manifest["target"], manifest["sparse"]
        return Package(
            folder=folder,
            name=manifest["model"],
            program=Program.from_json(_read(folder, PROGRAM, files[PROGRAM])),
            labels=labels,
            preprocess=preprocess,
            target=Target(**{**target, "features": tuple(target["features"])}),
            dtype=manifest["dtype"],
            tf32=manifest["tf32"],
            sparse=Chosen(**{**sparse, "layers": tuple(sparse["layers"])}),
            versions=versions,
            files=files,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} is incomplete ({error!r})") from None


def write(
    folder: Path,
    *,
    name: str,
    program: Program,
    target: Target,
    dtype: DType,
    tf32: bool,
    sparse: Chosen,
    graph: bytes,
    weights: Mapping[str, Bound],
    labels: Sequence[str],
    preprocess: dict[str, Any],
    versions: dict[str, str],
    resample: bytes | None = None,
) -> None:
    """Writes a compiled model into ``folder``, which is there and empty.

    Raises:
        OSError: If it cannot be written.
    """
    (folder / GRAPH).write_bytes(graph)
    if resample is not None:
        (folder / RESAMPLE).write_bytes(resample)
    _write_weights(folder / WEIGHTS, weights)
    (folder / PROGRAM).write_text(program.to_json(), encoding="utf-8")
    names = {"id2label": {str(i): label for i, label in enumerate(labels)}}
    (folder / CONFIG).write_text(_json(names), encoding="utf-8")
    (folder / PREPROCESS).write_text(_json(preprocess), encoding="utf-8")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": name,
        "target": asdict(target),
        "dtype": dtype.name,
        "tf32": tf32,
        "sparse": asdict(sparse),
        "versions": {"max": max_version, **versions},
        "files": {path.name: _sum(path) for path in sorted(folder.iterdir())},
    }
    manifest["sha256"] = _own_sum(manifest)
    (folder / MANIFEST).write_text(_json(manifest), encoding="utf-8")


def _write_weights(path: Path, weights: Mapping[str, Bound]) -> None:
    """Writes a safetensors file, weight by weight.

    Those that fill whole cache lines come first, so that each begins with one.
    """
    ordered = sorted(weights.items(), key=lambda item: item[1].bytes % ALIGNMENT != 0)
    header: dict[str, Any] = {}
    end = 0
    for name, weight in ordered:
        begin, end = end, end + weight.bytes
        header[name] = {
            "dtype": _CODES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, weight in ordered:
            file.write(weight.array().reshape(-1).view(np.uint8).data)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest.pop("sha256") != _own_sum(manifest):
            raise ValueError("its sum differs")
    except OSError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(folder, f"{MANIFEST} is not what was written") from None
    return dict(manifest)


def _own_sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sum(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _read(folder: Path, name: str, expected: dict[str, Any]) -> bytes:
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise _damaged(folder, f"{name} cannot be read ({error.strerror})") from None
    _compare(folder, name, expected, content)
    return content


def _compare(folder: Path, name: str, expected: dict[str, Any], content: Any) -> None:
    if len(content) != expected["bytes"]:
        problem = f"{name} has {len(content):,} bytes instead of {expected['bytes']:,}"
    elif hashlib.sha256(content).hexdigest() != expected["sha256"]:
        problem = f"{name} is not what was written (its SHA-256 differs)"
    else:
        return
    raise _damaged(folder, problem)


def _damaged(folder: Path, problem: str) -> ModelError:
    return ModelError(
        f"{folder}: the compiled model is damaged: {problem}; copy the folder again, or {_AGAIN}"
    )


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
