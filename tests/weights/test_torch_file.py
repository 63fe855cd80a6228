"""What torch.save wrote is read as torch reads it, bit for bit, in both of its formats."""

import io
import pickle
import re
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from maxvision.common.errors import ModelError
from maxvision.weights import load
from maxvision.weights.files import read_file
from tests.weights import models
from tests.weights.test_formats import assert_same

LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def save(content, path, legacy=False, **options):
    torch.save(content, path, _use_new_zipfile_serialization=not legacy, **options)
    return path


def bits(tensor):
    """Gives torch's tensor as numpy does, bfloat16 widened."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()


def assert_reads(content, path, legacy=False, **options):
    save(content, path, legacy, **options)
    state, expected = read_file(path), torch.load(path, weights_only=True)
    assert list(state.tensors) == list(expected)
    for key, tensor in expected.items():
        array, wanted = state.tensors[key], bits(tensor)
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype), key
        assert array.tobytes() == wanted.tobytes(), key
        assert state.dtypes[key] == str(tensor.dtype).removeprefix("torch."), key
    return state


def refuses(path, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_file(path)
    said = str(caught.value)
    start = f"{path}: this cannot be read as a state dict (names to tensors): "
    assert said.startswith(start) and "\n" not in said and len(said) < 500
    return said


@LEGACY
@pytest.mark.parametrize(
    "dtype",
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split(),
)
def test_dtypes(dtype, legacy, tmp_path):
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 40
    assert_reads({"a": values.to(getattr(torch, dtype))}, tmp_path / "net.pth", legacy)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_dtypes_that_torch_keeps_as_bytes(dtype, tmp_path):
    assert_reads({"a": torch.arange(6).to(getattr(torch, dtype))[1:]}, tmp_path / "net.pth")


@LEGACY
def test_views(legacy, tmp_path):
    base = torch.arange(120, dtype=torch.float32)
    cube = base.reshape(4, 5, 6)
    content = {
        "whole": cube,
        "transposed": cube.permute(2, 0, 1),
        "tail": base[50:].reshape(7, 10),
        "steps": base[3::7],
        "diagonal": cube[0].diagonal(),
        "window": base.as_strided((3, 4), (2, 3), 11),
        "last": base[119:],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "one": torch.tensor(3.5),
        "element": base[77],
        "none": torch.zeros(0, 3),
        "nothing": base[5:5],
        "expanded": torch.arange(6).expand(1, -1),
    }
    state = assert_reads(content, tmp_path / "net.pth", legacy)
    assert all(np.shares_memory(state.tensors["whole"], state.tensors[k]) for k in ("tail", "last"))


@LEGACY
def test_parameters_and_ordered_dicts(legacy, tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    assert net.state_dict()._metadata  # which is pickled with BUILD
    assert_reads(net.state_dict(), tmp_path / "net.pth", legacy)
    with_state = torch.nn.Parameter(torch.ones(3))
    with_state.note = "text"
    attributed = torch.ones(2)
    attributed.note = "text"
    content = {**dict(net.named_parameters()), "noted": with_state, "attributed": attributed}
    assert_reads(content, tmp_path / "net.pth", legacy)


@LEGACY
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol, legacy, tmp_path):
    net = torch.nn.Conv2d(3, 4, 3)
    save(net.state_dict(), tmp_path / "net.pth", legacy, pickle_protocol=protocol)
    state = read_file(tmp_path / "net.pth")
    assert state.tensors["weight"].tobytes() == net.weight.detach().numpy().tobytes()


def test_tensors_stay_in_the_file(tmp_path):
    save({"a": torch.ones(300, 100)}, tmp_path / "net.pth")
    state = read_file(tmp_path / "net.pth")
    (mapped,) = state.maps
    assert np.shares_memory(state.tensors["a"], np.frombuffer(mapped.data, np.uint8))
    (tmp_path / "net.pth").write_bytes(b"other")
    with pytest.raises(ModelError, match=r"net\.pth: .* overwritten"), state.reading():
        pass


def test_tensors_of_a_gpu(tmp_path):
    save({"a": torch.arange(4.0)}, tmp_path / "cpu.pth")
    edited(tmp_path / "cpu.pth", tmp_path / "gpu.pth", b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    assert read_file(tmp_path / "gpu.pth").tensors["a"].tolist() == [0, 1, 2, 3]


def test_big_endian(tmp_path):
    save({"a": torch.arange(4.0), "b": torch.arange(4).bfloat16()}, tmp_path / "net.pth")
    swapped = rezip(
        tmp_path / "net.pth",
        tmp_path / "big.pth",
        lambda name, data: (
            b"big" if name.endswith("byteorder") else data[::-1] if "/data/" in name else data
        ),
    )
    state = read_file(swapped)
    assert state.tensors["a"].tolist() == state.tensors["b"].tolist() == [3, 2, 1, 0]


def test_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        assert_reads({"a": torch.ones(3)}, tmp_path / "net.pth")
    finally:
        torch.serialization.set_crc32_options(True)


@LEGACY
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_made_dense(legacy, tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 8, generator=generator) * (torch.rand(6, 8, generator=generator) > 0.7)
    doubled = torch.sparse_coo_tensor([[0, 2, 0], [1, 0, 1]], [1.0, 2.0, 3.0], (3, 2))
    content = {
        "coo": values.to_sparse(),
        "hybrid": torch.randn(4, 3, 2).to_sparse(1),
        "twice": doubled,
        "csr": values.to_sparse_csr(),
        "csc": values.to_sparse_csc(),
        "bsr": values.to_sparse_bsr((2, 4)),
        "bsc": values.to_sparse_bsc((3, 2)),
        "empty": torch.zeros(3, 4).to_sparse(),
        "half": values.bfloat16().to_sparse(),
    }
    assert_reads(content, tmp_path / "net.pth", legacy)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_that_do_not_run(tmp_path):
    numbers = torch.arange(4.0)
    quantised = torch.quantize_per_tensor(numbers, 0.1, 3, torch.quint8)
    by_channel = torch.quantize_per_channel(
        numbers.reshape(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    )
    for tensor, message in [
        (numbers + 1j, "'a' is complex64, and the dtypes that run here are float64, float32,"),
        (numbers.to(torch.float8_e4m3fn), "'a' is float8_e4m3fn, "),
        (quantised, "'a' is quint8, "),
        (by_channel, "'a' is qint8, "),
        (torch.tensor([1j, 2j]).conj().imag, "'a' is a negation that is not done"),
        (torch.zeros(3, device="meta"), r"'a' has no numbers \(it was on the device meta\)"),
        (torch.ones(1).expand(3), r"'a' needs more than the \d numbers that are stored for it"),
    ]:
        refuses(save({"a": tensor}, tmp_path / "net.pth"), message)


# --- training checkpoints ---------------------------------------------------------------------


def other_things(weights):
    """Lists what training checkpoints hold besides weights."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(each.float()) for each in weights])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(),
        "optimizer_state": defaultdict(dict, {0: {"step": 3}}),
        "epoch": 3,
        "best": np.float64(0.5),
        "history": np.arange(3.0),
        "args": SimpleNamespace(),
        "seen": {1, 2},
        "counts": Counter("aab"),
        "last": deque([1, 2], 3),
        "raw": b"bytes",
        "device": torch.device("cuda:0"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "path": Path("runs/3"),
        "number": 1 << 70,
        "complex": 1 + 2j,
        ("a", (1, 2)): None,
        "ema": torch.ones(2),
    }


@LEGACY
def test_what_is_beside_the_weights_is_not_looked_into(legacy, tmp_path):
    from argparse import Namespace

    net = models.resnet()
    state = models.torchvision_names(net)
    content = {**other_things(state.values()), "args": Namespace(lr=0.1), "state_dict": state}
    save(content, tmp_path / "model_best.pth.tar", legacy)
    loaded = load(tmp_path / "model_best.pth.tar")
    assert loaded.name == "model_best"
    assert_same(loaded, load(models.save(net, tmp_path / "hf")))


@LEGACY
@pytest.mark.parametrize("prefix", ["model.", "module.", "model._orig_mod.", "model.module."])
def test_lightning(prefix, legacy, tmp_path):
    net = models.resnet()
    state = {f"{prefix}{k}": v for k, v in models.torchvision_names(net).items()}
    content = {
        "epoch": 9,
        "pytorch-lightning_version": "2.1.0",
        "state_dict": OrderedDict(state),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "sizes": (1, 2)},
    }
    save(content, tmp_path / "last.ckpt", legacy)
    loaded = load(tmp_path / "last.ckpt")
    assert loaded.name == "last"
    assert_same(loaded, load(models.save(net, tmp_path / "hf")))


def test_averaged_weights_come_first(tmp_path):
    net, average = models.resnet(), models.resnet()
    models.randomise(average, seed=7)
    kept = torch.optim.swa_utils.AveragedModel(average).state_dict()
    names = {k: k for k in average.state_dict()} | dict(
        zip(average.state_dict(), models.torchvision_names(average), strict=True)
    )
    ema = {
        key if key == "n_averaged" else f"module.{names[key.removeprefix('module.')]}": value
        for key, value in kept.items()
    }
    assert "n_averaged" in ema
    content = {"model": models.torchvision_names(net), "model_ema": ema}
    save(content, tmp_path / "checkpoint.pth")
    expected = load(models.save(average, tmp_path / "average"))
    assert_same(load(tmp_path / "checkpoint.pth"), expected)
    content["model_ema"] = {}
    save(content, tmp_path / "checkpoint.pth")
    assert_same(load(tmp_path / "checkpoint.pth"), load(models.save(net, tmp_path / "net")))


def test_a_prefix_is_dropped_if_all_shards_have_it(tmp_path):
    import json

    save({"model.a": torch.ones(2)}, tmp_path / "one.bin")
    save({"head": torch.ones(2)}, tmp_path / "two.bin")
    index = {"weight_map": {"model.a": "one.bin", "head": "two.bin"}}
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps(index))
    from maxvision.weights.files import read_shards

    assert list(read_shards(path).tensors) == ["model.a", "head"]


@pytest.mark.parametrize("name", ["net.pth", "net.pt", "net.bin", "net.ckpt", "net.pth.tar"])
def test_a_folder_with_a_checkpoint_of_any_ending(name, tmp_path):
    net = models.resnet()
    folder = tmp_path / "folder"
    folder.mkdir()
    save(models.torchvision_names(net), folder / name)
    assert load(folder).name == "folder"
    assert load(folder / name).name == "net"


def test_another_ending(tmp_path):
    save({}, tmp_path / "net.tar")
    with pytest.raises(ModelError, match=r"must end in \.safetensors, .*\.pth\.tar but .* '\.tar'"):
        load(tmp_path / "net.tar")


# --- damaged and hostile files ----------------------------------------------------------------


def rezip(source, target, change=lambda _, data: data, method=zipfile.ZIP_STORED, more=()):
    """Writes an archive anew, its records changed, and some more."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
        for name, data in more:
            new.writestr(name, data)
    return target


def edited(source, target, old, new):
    """Replaces bytes of the pickle in an archive."""

    def change(name, data):
        if not name.endswith("data.pkl"):
            return data
        assert old in data
        return data.replace(old, new)

    return rezip(source, target, change)


@pytest.fixture
def path(tmp_path):
    return save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "net.pth")


# The pickle of `path` ends in: BINPERSID, offset 0, shape (2, 3), strides (3, 1), False, ...
SEEN = b"QK\x00K\x02K\x03\x86q\x08K\x03K\x01\x86"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (b"QK\x00K\x02K\x04\x86q\x08K\x03K\x01\x86", "'a' needs more than the 6 numbers"),
        (b"QK\x01K\x02K\x03\x86q\x08K\x03K\x01\x86", "'a' needs more than the 6 numbers"),
        (b"QK\x00K\x02K\x03\x86q\x08K\x04K\x01\x86", "'a' needs more than the 6 numbers"),
        (b"QK\x00K\xffK\xff\x86q\x08K\x00K\x00\x86", "'a' needs more than the 6 numbers"),
        (b"QJ\xff\xff\xff\xffK\x02K\x03\x86q\x08K\x03K\x01\x86", "'a' has an impossible shape"),
        (b"QK\x00J\xff\xff\xff\xffK\x03\x86q\x08K\x03K\x01\x86", "'a' has an impossible shape"),
        (b"QK\x00K\x02K\x03\x86q\x08J\xff\xff\xff\xffK\x01\x86", "'a' has an impossible shape"),
        (b"QK\x00K\x00\x8a\x09\0\0\0\0\0\0\0\0\x01\x86q\x08K\x03K\x01\x86", "an impossible shape"),
        (b"QK\x00K\x02K\x03\x86q\x08K\x03\x85", "it is damaged"),
        (b"QK\x00K\x02G\0\0\0\0\0\0\0\0\x86q\x08K\x03K\x01\x86", "shape or strides are no numb"),
        (b"QNK\x02K\x03\x86q\x08K\x03K\x01\x86", "a tensor's offset is no number"),
        (b"0NK\x00K\x02K\x03\x86q\x08K\x03K\x01\x86", "a tensor has no storage"),
    ],
)
def test_a_tensor_that_its_storage_does_not_hold(changed, message, path, tmp_path):
    refuses(edited(path, tmp_path / "bad.pth", SEEN, changed), message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x06tq\x07Q", b"\x8a\x05\0\0\0\0\x10tq\x07Q", "it is damaged or cut off"),
        (b"K\x06tq\x07Q", b"J\xff\xff\xff\xfftq\x07Q", "asks for what is no storage"),
        (b"storage", b"modules", "asks for what is no storage"),
        (b"X\x01\0\0\x000q", b"X\x01\0\0\x009q", r"no record 'data/9'"),
        (b"torch\nFloatStorage", b"torch\nfloat32", "a tensor's storage is none"),
        (b"torch\nFloatStorage", b"torch\nTopStorage", r"it holds torch\.TopStorage, which"),
    ],
)
def test_a_storage_that_is_not_there(old, new, message, path, tmp_path):
    refuses(edited(path, tmp_path / "bad.pth", old, new), message)


def test_a_huge_sparse_tensor(tmp_path):
    huge = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.long), [], (1 << 20, 1 << 20))
    refuses(save({"a": huge}, tmp_path / "net.pth"), "'a' is sparse and too large to be made dense")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("index", [-1, 4])
def test_indices_beyond_a_sparse_tensor(index, tmp_path):
    places = torch.tensor([[0, index]])
    outside = torch.sparse_coo_tensor(places, torch.ones(2), (4,), check_invariants=False)
    refuses(save({"a": outside}, tmp_path / "net.pth"), "'a' has indices that do not fit its shape")
    for bounds, others in [([0, 1, index], [0, 1]), ([0, 1, 2], [0, index]), ([1, 1, 2], [0, 1])]:
        rows = torch.sparse_csr_tensor(
            bounds, others, torch.ones(2), (2, 4), check_invariants=False
        )
        refuses(save({"a": rows}, tmp_path / "net.pth"), "'a' has indices that do not fit")


def test_one_storage_in_many_tensors(tmp_path):
    shared = torch.zeros(1 << 16, dtype=torch.bfloat16)
    content = {f"a{i}": shared[i:] for i in range(300)}  # 300 times as much, widened twice that
    refuses(save(content, tmp_path / "net.pth"), "its tensors are the same numbers too often")


@LEGACY
def test_truncated(legacy, tmp_path):
    whole = save({"a": torch.ones(30)}, tmp_path / "whole.pth", legacy).read_bytes()
    for kept in (1, 2, 30, 100, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        path = tmp_path / "net.pth"
        path.write_bytes(whole[:kept])
        refuses(path, "damaged or cut off|torch.save did not write it")


def test_legacy_storages_must_be_those_of_the_tensors(tmp_path):
    path = save({"a": torch.ones(5)}, tmp_path / "net.pth", legacy=True)
    whole = path.read_bytes()
    size = struct.pack("<q", 5)
    assert whole.count(size) == 1
    for changed, message in [
        (whole.replace(size, struct.pack("<q", 4)), "damaged or cut off"),
        (whole.replace(size, struct.pack("<q", -5)), "damaged or cut off"),
        (whole.replace(size, struct.pack("<q", 1 << 60)), "damaged or cut off"),
        (whole + b"more", "something follows the end of its tensors"),
        (whole[: whole.index(size) - 20], "damaged or cut off"),
    ]:
        path.write_bytes(changed)
        refuses(path, message)
    keys = whole[: whole.index(size)]
    start = keys.rindex(b"\x80\x02]")
    for other in (["9"], [], None, ["9", "9"]):
        path.write_bytes(keys[:start] + pickle.dumps(other, 2) + whole[whole.index(size) :])
        refuses(path, "the storages at its end are not those of its tensors")


def test_legacy_views_of_a_storage(tmp_path):
    """Before torch 0.4 a storage could be a part of another: (key, first, count)."""
    path = save({"a": torch.arange(9.0)}, tmp_path / "net.pth", legacy=True)
    whole = path.read_bytes()
    # BININT1 9, NONE, TUPLE, ..., BINPERSID, offset 0, shape (9,), strides (1,)
    old = re.search(rb"K\x09Nt(q.)QK\x00K\x09\x85", whole, re.DOTALL)
    part = b"K\x09X\x01\0\0\0pK\x02K\x04\x87t" + old[1] + b"QK\x01K\x03\x85"
    path.write_bytes(whole.replace(old[0], part))
    assert read_file(path).tensors["a"].tolist() == [3, 4, 5]
    assert torch.load(path, weights_only=True)["a"].tolist() == [3, 4, 5]
    path.write_bytes(whole.replace(old[0], part.replace(b"QK\x01", b"QK\x02")))
    refuses(path, "'a' needs more than the 4 numbers")
    path.write_bytes(whole.replace(old[0], part.replace(b"K\x02K\x04", b"K\x06K\x04")))
    refuses(path, "damaged or cut off")


def test_a_tar_archive(tmp_path):
    import tarfile

    path = tmp_path / "net.pth.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    refuses(path, "it is a tar archive, torch's format until 2017")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path):
    scripted = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    torch.jit.save(scripted, tmp_path / "net.pt")
    refuses(tmp_path / "net.pt", "it is a TorchScript program")


@pytest.mark.parametrize(
    "content", [b"7z\xbc\xaf\x27\x1c" + bytes(90), b"\x89PNG\r\n\x1a\n", pickle.dumps({"a": 1})]
)
def test_another_kind_of_file(content, tmp_path):
    (tmp_path / "net.pth").write_bytes(content)
    refuses(tmp_path / "net.pth", "torch.save did not write it")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_compressed_archive(method, path, tmp_path):
    refuses(rezip(path, tmp_path / "bad.pth", method=method), r"data\.pkl' is compressed")


def test_an_archive_with_several_pickles(path, tmp_path):
    more = [("other/data.pkl", b"cos\nsystem\n(tR.")]
    refuses(rezip(path, tmp_path / "bad.pth", more=more), r"its archive has 2 records data\.pkl")
    empty = rezip(path, tmp_path / "bad.pth", lambda name, data: b"")
    with zipfile.ZipFile(empty, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("net/data.pkl", b"cos\nsystem\n(tR.")
    refuses(empty, "its archive has two records of one name")
    with zipfile.ZipFile(tmp_path / "none.pth", "w") as archive:
        archive.writestr("data.txt", b"cos\nsystem\n(tR.")
    refuses(tmp_path / "none.pth", r"its archive has no records data\.pkl")


def patched(path, place, change):
    """Changes one byte of the first header of data.pkl: local, or in the central directory."""
    data = bytearray(path.read_bytes())
    header = data.index(b"PK\3\4") if place == "local" else data.index(b"PK\1\2")
    offset, value = change
    data[header + offset + (0 if place == "local" else 2)] = value
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("flag", [0x1, 0x20, 0x40])
@pytest.mark.parametrize("place", ["local", "central"])
def test_flags_of_an_archive(place, flag, path):
    refuses(patched(path, place, (6, flag)), "is encrypted or patched")


@pytest.mark.parametrize("place", ["local", "central"])
def test_the_method_of_an_archive(place, path):
    refuses(patched(path, place, (8, 8)), "is compressed")


def test_a_local_header_of_another_name(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b"data.pkl", b"datap.kl", 1))
    refuses(path, "its archive has another record in the place of 'net/data.pkl'")


def test_a_wrong_checksum(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b"storage", b"storagE", 1))
    refuses(path, r"the checksum of data\.pkl is another")


def test_a_pickle_behind_the_pickle(path, tmp_path):
    bad = rezip(
        path,
        tmp_path / "bad.pth",
        lambda name, data: data + b"cos\nsystem\n(tR." if name.endswith("data.pkl") else data,
    )
    refuses(bad, r"something follows the end of data\.pkl")


def test_byte_order(path, tmp_path):
    bad = rezip(
        path,
        tmp_path / "bad.pth",
        lambda name, data: b"middle" if name.endswith("byteorder") else data,
    )
    refuses(bad, "damaged or cut off")
