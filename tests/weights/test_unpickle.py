"""Hostile pickles are refused in one sentence, and nothing of what they ask for is done.

The tricks are those that scanners of pickles were beaten with:
https://github.com/mmaitre314/picklescan, its tests and its advisories.
"""

import builtins
import copyreg
import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from maxvision.common.errors import ModelError
from maxvision.weights import unpickle
from maxvision.weights.files import read_file

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)


@pytest.fixture
def marker(tmp_path):
    """A file that a payload would make."""
    return tmp_path / "pwned"


@pytest.fixture
def refuses(tmp_path, marker, monkeypatch):
    """Asserts that a pickle is refused: alone, in an archive, and in the older format."""

    def check(pickled, message):
        archive = tmp_path / "archive.pth"
        with zipfile.ZipFile(archive, "w") as new:
            new.writestr("net/data.pkl", pickled)
        stream = tmp_path / "stream.pth"
        stream.write_bytes(MAGIC + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + pickled)
        begins = tmp_path / "begins.pth"
        begins.write_bytes(MAGIC + pickled)
        for path in (archive, stream, begins):
            with pytest.raises(ModelError, match=message) as caught:
                read_file(path)
            said = str(caught.value)
            start = f"{path}: this cannot be read as a state dict (names to tensors): "
            assert said.startswith(start)
            assert "\n" not in said and said.isprintable() and len(said) < 500
            damaged = "it is damaged or cut off" in said
            ways_out = "download it again", "torch.save(model.state_dict(), 'weights.pth')"
            assert said.endswith(ways_out[not damaged])
        assert not marker.exists()

        def forbidden(*args, **kwargs):
            raise AssertionError(f"it imports {args[0]}")

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", forbidden)
            with pytest.raises((unpickle.PickleError, unpickle.DamagedError)):
                unpickle.load(io.BytesIO(pickled))

    return check


def text(value):
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def short(value):
    data = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data


def stack_global(module, name):
    return short(module) + short(name) + pickle.STACK_GLOBAL


def plain_global(module, name):
    return f"c{module}\n{name}\n".encode()


DANGEROUS = """
    os.system os.popen os.execv posix.system nt.system subprocess.Popen subprocess.run
    subprocess.check_output commands.getoutput pty.spawn shutil.rmtree sys.exit sys.modules
    builtins.eval builtins.exec builtins.compile builtins.getattr builtins.setattr builtins.open
    builtins.__import__ builtins.apply builtins.breakpoint builtins.globals builtins.vars
    builtins.type builtins.object builtins.map builtins.print
    __builtin__.eval __builtin__.execfile __builtin__.getattr __builtin__.globals
    importlib.import_module importlib.reload runpy._run_code runpy.run_path pickle.loads
    _pickle.loads pickle.Unpickler marshal.loads dill.loads cloudpickle.loads joblib.load
    shelve.open operator.attrgetter operator.itemgetter operator.methodcaller functools.partial
    functools.reduce itertools.starmap types.FunctionType types.CodeType code.interact
    bdb.Bdb.run pdb.run pdb.Pdb cProfile.run cProfile.runctx profile.Profile.run
    profile.Profile.runctx trace.Trace.run trace.Trace.runctx timeit.timeit doctest.debug_script
    code.InteractiveInterpreter.runcode pip.main pip._internal.main ensurepip._run_pip venv.create
    idlelib.autocomplete.AutoComplete.get_entity idlelib.calltip.get_entity
    idlelib.debugobj.ObjectTreeItem.SetText idlelib.pyshell.ModifiedInterpreter.runcode
    idlelib.run.Executive.runcode lib2to3.pgen2.grammar.Grammar.loads
    lib2to3.pgen2.pgen.ParserGenerator.make_label pydoc.pipepager pydoc.locate
    asyncio.unix_events._UnixSubprocessTransport._start asyncio.run socket.create_connection
    http.client.HTTPSConnection httplib.HTTPSConnection urllib.request.urlopen requests.api.get
    aiohttp.ClientSession ssl.get_server_certificate webbrowser.open io.FileIO io.open_code
    linecache.getline ctypes.CDLL ctypes.WinDLL distutils.file_util.write_file zipimport.zipimporter
    logging.config.fileConfig _thread.start_new_thread multiprocessing.util.spawnv_passfds
    numpy.load numpy.f2py.crackfortran.getlincoef numpy.testing._private.utils.runstring
    numpy.ctypeslib.load_library numpy.fromfile pandas.read_pickle pandas.eval
    torch.load torch.serialization.load torch.hub.load torch.hub.load_state_dict_from_url
    torch.jit.load torch.compile torch.classes.load_library torch.ops.load_library
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._import_dotted_name
    torch._dynamo.guards.GuardBuilder.get torch._inductor.codecache.compile_file
    torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression
    torch.jit.unsupported_tensor_ops.execWrapper torch.utils._config_module.ConfigModule.load_config
    torch.utils._config_module.load_config torch.utils.bottleneck.__main__.run_cprofile
    torch.utils.bottleneck.__main__.run_autograd_prof torch.utils.collect_env.run
    torch.utils.collect_env.run_and_read_all torch.distributed.rpc.rpc_sync
    torch.utils.data.datapipes.utils.decoder.basichandlers torch.nn.modules.linear.Linear
    copyreg._reconstructor copy_reg._reconstructor copyreg.__newobj__ antigravity.geohash
""".split()


@pytest.mark.parametrize("opcode", [plain_global, stack_global], ids=["GLOBAL", "STACK_GLOBAL"])
def test_globals(opcode, refuses, marker):
    for full in DANGEROUS:
        module, _, name = full.rpartition(".")
        call = pickle.MARK + text(f"touch {marker}") + pickle.TUPLE + pickle.REDUCE + pickle.STOP
        refuses(opcode(module, name) + call, f"it holds {full}, which is neither")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._utils", "_rebuild_tensor.__globals__"),
        ("torch._utils", "_rebuild_tensor_v2.__class__"),
        ("torch", "_utils.importlib.import_module"),
        ("torch", "serialization.os.system"),
        ("torch", "FloatStorage.__init__.__globals__"),
        ("torch.utils._config_module", "ConfigModule.load_config"),
        ("collections", "OrderedDict.__init__"),
        ("collections", "abc.sys.modules"),
        ("collections", "_sys"),
        ("", "os.system"),
        ("torch._utils ", "_rebuild_tensor"),
        ("torch", ""),
        ("numpy", "f2py.os.system"),
    ],
)
def test_dotted_names(module, name, refuses):
    refuses(b"\x80\x04" + stack_global(module, name) + b")R.", "it holds .*, which is neither")
    if module:
        refuses(plain_global(module, name) + b")R.", "it holds .*, which is neither")


def test_a_name_in_a_message_is_short_and_printable(refuses):
    refuses(stack_global("a\x1b[31m\u202e", "x" * 200) + b".", r"it holds a\\x1b\[31m\\u202e\.xxx")


class Payload:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
def test_reduce(protocol, refuses, marker):
    for function in (os.system, eval, exec):
        content = {"a": torch.ones(1).tolist(), "b": [Payload(function, (f"touch {marker}",))]}
        refuses(pickle.dumps(content, protocol), "it holds .*, which is neither a tensor nor a")
    inner = pickle.dumps(Payload(os.system, (f"touch {marker}",)), protocol)
    refuses(pickle.dumps(Payload(pickle.loads, (inner,)), protocol), "it holds _?pickle.loads")
    refuses(
        pickle.dumps(Payload(OrderedDict, (), None, None, iter([("a", Payload(eval, ("1",)))]))),
        "it holds builtins.eval",
    )


def test_saved_by_torch(tmp_path, marker):
    content = {"state_dict": {"a": torch.ones(2)}, "x": Payload(os.system, (f"touch {marker}",))}
    for zipped in (True, False):
        path = tmp_path / "net.pth"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ModelError, match=r"it holds (posix|nt)\.system, which is neither"):
            read_file(path)
    assert not marker.exists()


TRICKS = {
    # names that go through the memo
    "memo": (
        b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(Vtouch X\n\x86R.",
        r"it holds os\.system",
    ),
    "names as bytes strings": (b"S'os'\nS'system'\n\x93S'ls'\n\x85R.", r"it holds os\.system"),
    "a memo that is not there": (b"\x80\x04h\x03h\x00\x93K\x42.", "damaged"),
    "dangerous, then a memo that is not there": (
        b"\x80\x04cos\nsystem\nVtouch X\n\x85R0\x8c\x02os\x94h\x03h\x00\x93K\x42.",
        r"it holds os\.system",
    ),
    "a name that is a number": (
        b"\x80\x04J\x2a\0\0\0\x94\x8c\x02os\x94h\x00h\x01\x93.", "names a global by what is no text"
    ),
    "dangerous, then broken": (b"cbuiltins\nexec\n(X>\0\0\0f = open('my_file.txt', 'a')tRX.",
                               r"it holds builtins\.exec"),
    "invalid bytes in a name": (b"cmod\n\xf8\n.", "damaged"),
    "dangerous without an end": (b"cos\nsystem\n(Vtouch X\ntR", r"it holds os\.system"),
    "sour pickles": (b"c__builtin__\nglobals\n(tRp100\n0c__builtin__\ncompile\n(S'x'\ntR.",
                     r"it holds __builtin__\.globals"),
    # other ways to call or to make
    "INST": (b"(S'touch X'\nios\nsystem\n.", "it has the instruction INST"),
    "INST of a container": (b"(icollections\nOrderedDict\n.", "it has the instruction INST"),
    "OBJ": (b"(ccollections\nOrderedDict\no.", "it has the instruction OBJ"),
    "NEWOBJ": (b"\x80\x02cos\nsystem\nVtouch X\n\x85\x81.", r"it holds os\.system"),
    "NEWOBJ_EX": (b"\x80\x04ccollections\nOrderedDict\n)}Vlast\nNs\x92.", "arguments by name"),
    "PERSID": (b"Pos.system\n.", "it has the instruction PERSID"),
    "EXT1": (b"\x80\x02\x82\xf0(Vtouch X\ntR.", "it has the instruction EXT1"),
    "EXT2": (b"\x80\x02\x83\xf0\x00(Vtouch X\ntR.", "it has the instruction EXT2"),
    "EXT4": (b"\x80\x02\x84\xf0\x00\x00\x00(Vtouch X\ntR.", "it has the instruction EXT4"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "it has the instruction NEXT_BUFFER"),
    "READONLY_BUFFER": (b"\x80\x05N\x98.", "it has the instruction READONLY_BUFFER"),
    "REDUCE of text": (b"Vos.system\n)R.", "it calls what is no function"),
    "REDUCE of a dict": (b"})R.", "it calls what is no function"),
    "REDUCE of what was made": (b"ccollections\nOrderedDict\n)R)R.", "calls what is no function"),
    "REDUCE of a dtype": (b"ctorch\nfloat32\n)R.", "it calls what is no function"),
    "REDUCE with a list": (b"ccollections\nOrderedDict\n]R.", "it calls what is no function"),
    "NEWOBJ of text": (b"\x80\x02Vos\n)\x81.", "it calls what is no function"),
    "too many arguments": (b"ctorch\nSize\n(K\x01K\x02tR.", "damaged"),
    # state, items and attributes
    "BUILD of a function": (
        b"ctorch._utils\n_rebuild_tensor_v2\n}V__code__\nNsb.", "gives a state to what has none"
    ),
    "BUILD of a function's slots": (
        b"ctorch._utils\n_rebuild_tensor_v2\nN}V__defaults__\n)s\x86b.", "gives a state to what has"
    ),
    "BUILD of a list": (b"]}V__class__\nNsb.", "gives a state to what has none"),
    "BUILD of text": (b"Va\n}V__class__\nNsb.", "gives a state to what has none"),
    "BUILD of a dtype": (b"ctorch\nfloat32\n}Vname\nVx\nsb.", "gives a state to what has none"),
    "SETITEM of a function": (
        b"ctorch\nSize\nV__code__\nNs.", "sets items of what is no dict"
    ),
    "SETITEM of a list": (b"](K\x00K\x01u.", "sets items of what is no dict"),
    "APPEND to a function": (b"ctorch\nSize\nNa.", "appends to what is no list"),
    "APPENDS to a dict": (b"}(NNe.", "appends to what is no list"),
    # storages
    "BINPERSID of text": (b"\x80\x02Vos.system\nQ.", "asks for what is no storage"),
    "BINPERSID of a function": (b"\x80\x02ccollections\nOrderedDict\nQ.", "damaged"),
    "BINPERSID of a module": (
        b"\x80\x02(Vmodule\nccollections\nOrderedDict\nVa.py\nVsource\nNtQ.", "no storage"
    ),
    "BINPERSID with another type": (
        b"\x80\x02(Vstorage\nccollections\nOrderedDict\nV0\nVcpu\nK\x01tQ.", "storage is none"
    ),
    "BINPERSID of two sizes": (
        b"\x80\x02(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"
        b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x02tQ.", "a storage has two sizes"
    ),
    # functions of the table, abused
    "a tensor of another function": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctorch\nTensor\n)NtR.",
        "a tensor is made by no function of torch",
    ),
    "a tensor of itself": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\n"
        b"ctorch\nTensor\n(NNNtNtR.", "a tensor is made by no function of torch",
    ),
    "a tensor of text": (
        b"ctorch._utils\n_rebuild_tensor_v2\n(Vos\nK\x00))NNtR.", "a tensor has no storage"
    ),
    "a layout that is none": (b"ctorch.serialization\n_get_layout\n(NtR.", "layout is none"),
    "a sparse tensor of nothing": (
        b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\n"
        b"(Vtorch.sparse_coo\ntR(NNNttR.", "a sparse tensor is damaged",
    ),
    # what a machine could stumble over
    "nothing": (b".", "damaged"),
    "an empty stack below a mark": (b"N(\x85.", "damaged"),
    "half an item": (b"}(Nu.", "damaged"),
    "a mark that is not there": (b"Nt.", "damaged"),
    "an unknown instruction": (b"\xff.", "damaged"),
    "text as long as memory": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.", "damaged"),
    "text of a negative length": (b"T\xff\xff\xff\xffabc.", "damaged"),
    "bytes as long as memory": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3fabc.", "damaged"),
    "a number as long as memory": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "damaged"),
    "many digits": (b"I" + b"9" * 9999 + b"\n.", "damaged|holds"),
}  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks(trick, refuses):
    pickled, message = TRICKS[trick]
    if trick == "many digits" and sys.version_info < (3, 11):
        pytest.skip("this Python reads numbers of any length")
    refuses(pickled, message)


def test_the_extension_registry(refuses, marker):
    """A class that Python has looked up for an extension code is cached past ``find_class``."""
    copyreg.add_extension("os", "system", 0xF0)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        refuses(b"\x80\x02\x82\xf0(" + text(f"touch {marker}") + b"tR.", "instruction EXT1")
    finally:
        copyreg.remove_extension("os", "system", 0xF0)


def load(pickled):
    return unpickle.load(io.BytesIO(pickled))


def test_state_is_dropped():
    state = {"__class__": "x", "__setitem__": "y", "_metadata": {}}
    ordered = Payload(OrderedDict, (), state, None, iter([("a", 1)]))
    made = load(pickle.dumps(ordered, 2))
    assert type(made) is dict and made == {"a": 1}


def test_whatever_may_be_called_is_ours():
    for (module, name), value in unpickle._GLOBALS.items():
        if isinstance(value, unpickle._Maker):
            assert value.make.__module__ == "maxvision.weights.unpickle", (module, name)
            assert type(value.make) is type(load), (module, name)
        else:
            assert isinstance(value, unpickle._Name), (module, name)
        for slot in ("make", "kind", "x"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(value, slot, None)


@pytest.mark.parametrize("opened", [b"(", b"]", b"](", b"}K\x00"])
def test_deep_nests_are_no_problem(opened):
    deep = 50_000
    closing = {b"(": b"t", b"]": b"a", b"](": b"e", b"}K\x00": b"s"}[opened]
    begins = opened * deep + b"N" + closing * deep
    load(begins + b".")
    key = b"}(" + b")" + b"\x85" * deep + b"Nu."  # a tuple of a tuple of ..., as a key
    assert len(load(key)) == 1


def test_tuples_that_double_are_not_hashed():
    """A tuple of twice the same tuple, 64 times: hashing it would take 2^64 steps."""
    key = b"}(" + b")" + b"2\x86" * 64 + b"Nu."
    assert len(load(key)) == 1


def test_copies_are_counted():
    """The same 1,000 pairs, made a dict 1,000 times."""
    pairs = b"](" + b"K\x01K\x02\x86" * 1000 + b"eq\x000"
    call = b"ccollections\nOrderedDict\nh\x00\x85R0"
    with pytest.raises(unpickle.PickleError, match="copies the same items again and again"):
        load(pairs + call * 1000 + b"N.")
    assert load(pairs + call[:-1] + b".") == {1: 2}


def test_python_2():
    """It wrote an OrderedDict as a list of pairs, and text as bytes."""
    pairs = b"](](U\x01aK\x01e](U\x01bK\x02ee"
    assert load(b"\x80\x02ccollections\nOrderedDict\n" + pairs + b"\x85R.") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"]q\x00h\x00a.", "it holds a list"),
        (b"}q\x00Vmodel\nh\x00s.", "'model' in it is a dict"),
        (b"}Va\n]q\x00h\x00as.", "'a' in it is a list"),
    ],
)
def test_what_holds_itself(pickled, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pth", "w") as archive:
        archive.writestr("net/data.pkl", pickled)
    with pytest.raises(ModelError, match=message):
        read_file(tmp_path / "net.pth")


def test_any_byte_may_be_wrong():
    """Every byte of a small pickle in turn: read, or refused."""
    stream = io.BytesIO()
    torch.save({"a": torch.arange(3.0), "b": torch.eye(2).to_sparse()}, stream)
    with zipfile.ZipFile(stream) as archive:
        whole = archive.read("archive/data.pkl")
    for place in range(len(whole)):
        for value in (0, 0x28, 0x52, 0xFF, whole[place] ^ 1):
            changed = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                load(changed)
            except (unpickle.PickleError, unpickle.DamagedError) as error:
                assert str(error).isprintable()
