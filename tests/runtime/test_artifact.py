"""The folder of a compiled model: what is written is read, and damage is told with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from max.driver import CPU, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef

from maxvision import runtime, weights
from maxvision.common.errors import DeviceError, ModelError
from maxvision.graphs.constants import e4m3_bits
from maxvision.graphs.parameters import ALIGNMENT, Bound
from maxvision.graphs.sparsity import Chosen
from maxvision.graphs.target import Target
from maxvision.runtime import artifact as package
from maxvision.runtime.classifier import build
from maxvision.runtime.executor import Unchecked
from maxvision.weights.files import read_file

RNG = np.random.default_rng(0)
ARRAYS = {
    "bias": RNG.standard_normal(5, np.float32),
    "filter": RNG.standard_normal(256, np.float32),
    "columns": RNG.integers(0, 99, 33, np.int32),
    "rounded": RNG.integers(-127, 128, 77, np.int8),
    "narrow": RNG.standard_normal((3, 32), np.float32),
    "eighths": RNG.standard_normal(48, np.float32),
}
DTYPES = {"columns": DType.int32, "rounded": DType.int8, "narrow": DType.bfloat16}
DTYPES["eighths"] = DType.float8_e4m3fn


def write(folder: Path, target: str = "cpu", dtype: DType = DType.float32, **changes: Any) -> Path:
    checkpoint = weights.load("resnet-cifar10")
    bound = {
        name: Bound(lambda array=array: array, array.shape, DTYPES.get(name, DType.float32))
        for name, array in ARRAYS.items()
    }
    folder.mkdir()
    package.write(
        folder,
        **{
            "name": checkpoint.name,
            "program": checkpoint.program((128, 128)),
            "target": Target.parse(target),
            "dtype": dtype,
            "tf32": False,
            "sparse": Chosen("always", ("stages.0.0.conv1",), "1 of 1 pruned layers sparse"),
            "graph": b"graph",
            "weights": bound,
            "labels": checkpoint.labels,
            "preprocess": checkpoint.preprocess,
            "versions": {"maxvision": "1"},
            **changes,
        },
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def edit(folder: Path, change: Callable[[dict[str, Any]], None], signed: bool = True) -> None:
    """Changes the manifest, and its sum if ``signed``."""
    path = folder / package.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    if signed:
        del manifest["sha256"]
        manifest["sha256"] = package._own_sum(manifest)
    path.write_text(json.dumps(manifest))


def test_what_is_written_is_read(folder: Path) -> None:
    checkpoint = weights.load("resnet-cifar10")
    found = package.read(folder)
    found.verify()
    assert (found.name, found.family, found.dtype) == ("resnet-cifar10", "resnet", "float32")
    assert found.program == checkpoint.program((128, 128)) and found.labels == checkpoint.labels
    assert found.preprocess == checkpoint.preprocess
    assert found.target == Target.parse("cpu")
    graph, registry = found.load(CPU())
    assert graph == b"graph" and set(registry) == set(ARRAYS)
    for name in ("bias", "filter", "columns", "rounded"):
        assert np.array_equal(registry[name].to_numpy(), ARRAYS[name])
    bits = registry["narrow"].view(DType.uint16).to_numpy().astype(np.uint32) << 16
    assert registry["narrow"].dtype == DType.bfloat16
    assert np.allclose(bits.view(np.float32), ARRAYS["narrow"], rtol=2**-8)
    assert registry["eighths"].dtype == DType.float8_e4m3fn
    bits = registry["eighths"].view(DType.uint8).to_numpy()
    assert np.array_equal(bits, e4m3_bits(ARRAYS["eighths"]))


def test_floats_of_8_bits_are_no_checkpoint(folder: Path) -> None:
    with pytest.raises(ModelError, match="a tensor has the dtype 'float8_e4m3fn', which is not"):
        read_file(folder / package.WEIGHTS)


@pytest.mark.parametrize("family", ["resnet", "cvt"])
def test_every_bundled_network_is_described_in_full(tmp_path: Path, family: str) -> None:
    program = weights.load(f"{family}-cifar10").program((128, 128))
    found = package.read(write(tmp_path / "m", program=program))
    assert found.program == program and found.family == family


def test_folders_of_before_are_refused_in_a_sentence(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(version=2))
    with pytest.raises(
        ModelError, match=r"format version 2, and version 4 is supported; compile it again"
    ):
        package.read(folder)


def test_other_programs_read_the_weights(folder: Path) -> None:
    with safetensors.safe_open(folder / package.WEIGHTS, "np") as file:
        assert set(file.keys()) == set(ARRAYS)
        assert np.array_equal(file.get_tensor("filter"), ARRAYS["filter"])


def test_a_cpu_computes_on_the_mapped_file(folder: Path) -> None:
    _, registry = package.read(folder).load(CPU())
    content = (folder / package.WEIGHTS).read_bytes()
    begin = content.index(ARRAYS["filter"].tobytes())
    assert begin % ALIGNMENT == 0
    address = registry["filter"].to_numpy().ctypes.data
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("NO /proc to see what is mapped")
    ranges = [line.split() for line in maps.read_text().splitlines() if str(folder) in line]
    assert any(
        int(low, 16) <= address < int(high, 16)
        for low, high in (entry[0].split("-") for entry in ranges)
    )
    assert address % ALIGNMENT == 0


@pytest.mark.parametrize("name", [package.GRAPH, package.WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_damaged_files(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:-1])
    else:
        content[-3] ^= 1
        path.write_bytes(content)
    assert package.is_here(folder)
    found = package.read(folder)
    for check in (found.verify, lambda: found.load(CPU())):
        with pytest.raises(ModelError, match=rf"damaged: {name} .*; copy the folder again, or"):
            check()


@pytest.mark.parametrize("name", [package.CONFIG, package.PREPROCESS])
def test_damaged_descriptions(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text().replace("2", "3"))
    with pytest.raises(ModelError, match=f"damaged: {name} is not what was written"):
        package.read(folder)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "manifest.json is not what was written"),
        (b"[]", "manifest.json is not what was written"),
        (b'{"format": "maxvision compiled model"}', "manifest.json is not what was written"),
        (None, r"manifest.json cannot be read \(No such file"),
    ],
)
def test_damaged_manifests(folder: Path, content: bytes | None, match: str) -> None:
    path = folder / package.MANIFEST
    path.unlink() if content is None else path.write_bytes(content)
    assert package.is_here(folder)
    with pytest.raises(ModelError, match=match):
        package.read(folder)


def test_an_edited_manifest(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(dtype="float16"), signed=False)
    with pytest.raises(ModelError, match=r"manifest\.json is not what was written"):
        package.read(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m["versions"].update(max="1.0"), r"MAX 1\.0 but this is MAX .*max==1\.0"),
        (lambda m: m.update(version=1), "format version 1, and version 4 is supported; compile"),
        (lambda m: m.pop("target"), "is incomplete"),
        (lambda m: m["files"].pop("graph.mef"), "is incomplete"),
        (lambda m: m["files"].pop("program.json"), "is incomplete"),
    ],
)
def test_other_versions_and_gaps(folder: Path, change: Any, match: str) -> None:
    edit(folder, change)
    with pytest.raises(ModelError, match=match):
        package.read(folder)


def test_other_folders_are_none(tmp_path: Path) -> None:
    assert not package.is_here(tmp_path) and not package.is_here(tmp_path / "missing")
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    assert not package.is_here(tmp_path) and not package.is_here("resnet-cifar10")


def test_a_gpus_folder_on_a_machine_without_one(tmp_path: Path) -> None:
    place = Target.parse("sm_90a")
    checkpoint = weights.load("resnet-cifar10")
    with place.device() as device:
        _, parameters = build(
            checkpoint,
            DeviceRef.from_device(device),
            DType.bfloat16,
            size=(128, 128),
            kernels=Unchecked(),
        )
    folder = write(tmp_path / "h100", "sm_90a", DType.bfloat16, weights=parameters.bound)
    package.read(folder).verify()
    with safetensors.safe_open(folder / package.WEIGHTS, "np") as file:
        assert file.get_slice("stem.filter").get_dtype() == "BF16"
        assert file.get_slice("stem.bias").get_dtype() == "F32"
    with pytest.raises(DeviceError, match=r"for sm_90a but device is cpu; omit --device"):
        runtime.load(str(folder), device="cpu")
    with pytest.raises(DeviceError, match=r"in bfloat16 but dtype is float16; omit --dtype"):
        runtime.load(str(folder), dtype="float16")
    if not accelerator_count():
        with pytest.raises(DeviceError, match="compiled for the GPU sm_90a but"):
            runtime.load(str(folder))


def test_exact_float32_is_asked_of_a_folder_that_rounds(tmp_path: Path) -> None:
    folder = write(tmp_path / "h100", "sm_90a", tf32=True)
    with pytest.raises(DeviceError, match=r"round float32 to TF32; compile it with --no-tf32"):
        runtime.load(str(folder), tf32=False)


def test_a_gpus_folder_may_prepare_pictures(tmp_path: Path, folder: Path) -> None:
    written = write(tmp_path / "h100", "sm_90a", resample=b"resample")
    assert package.read(written).resample() == b"resample"
    assert package.read(folder).resample() is None
    (written / package.RESAMPLE).write_bytes(b"resampl?")
    with pytest.raises(ModelError, match=r"resample\.mef is not what was written"):
        package.read(written).resample()
