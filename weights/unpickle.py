"""Reads the pickles in torch's checkpoints, and runs nothing that they ask for.

A pickle is a program for a stack machine. Python's own machine imports what the program names and
calls it, so that loading a file can do anything. The machine here is another one, without torch,
and it is safe because of what it lacks:

- It imports nothing and reads no attribute. A global is looked up by its full name in a table of
  this file; a name that is not there is refused before anything is made of it.
- Only functions of that table are called. They are ours, never torch's or Python's: they describe a
  tensor (where its bytes are, its dtype, shape and strides), make a dict, or drop their arguments.
- No state reaches an object. ``BUILD`` gives state to Python's objects; here it is dropped.
- Instructions that no state dict needs (``INST``, ``OBJ``, ``EXT1``, ...) are refused.
- Nothing recurses, keys of dicts are text and numbers, which are hashed at once, and what is copied
  is counted: time and memory grow with the file, and no faster.

The format: https://peps.python.org/pep-0307, pep-3154, and the standard library's pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any


class PickleError(ValueError):
    """Says in a few words why a pickle is not read."""


class ForbiddenError(PickleError):
    """Names a global that a pickle asks for and that is not in the table."""


class DamagedError(ValueError):
    """A pickle that is cut off or is none."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Describes a row of numbers in a checkpoint, or a part of one.

    Attributes:
        key: Names the row.
        dtype: Of its numbers, ``"uint8"`` if they are bytes.
        begin: The first number of this part.
        count: How many there are.
    """

    key: str
    dtype: str
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class Strided:
    """Describes a tensor by what it sees of a storage; nothing is checked yet.

    Attributes:
        storage: Where its numbers are; None if it has none (device ``meta``).
        dtype: Of its numbers, which may be another than the storage's.
        offset: Its first number in the storage, as all below counted in numbers.
        shape: Its sizes.
        strides: The step of each dimension.
        pending: Whether it is still to be negated or conjugated.
    """

    storage: Storage | None
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Sparse:
    """Describes a tensor of few nonzeros.

    Attributes:
        layout: ``"torch.sparse_coo"``, ....
        parts: Its indices and values: of the COO layout two tensors, of others three.
        shape: Its sizes.
    """

    layout: str
    parts: tuple[Strided, ...]
    shape: tuple[int, ...]


class Other:
    """Stands for what a checkpoint holds besides: numpy's numbers, sets, paths, options."""

    __slots__ = ()


OTHER = Other()

ITEMSIZES = {  # of torch's dtypes, bytes
    **dict.fromkeys(("uint8", "int8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}


@dataclass(frozen=True, slots=True)
class _Name:
    """A dtype, a storage's dtype, or a layout, which is no more than a name."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Maker:
    """A global that may be called: it makes something of the arguments it gets."""

    make: Callable[..., object]
    tensor: bool = False


def _rebuild(storage: object, offset: object, shape: object, strides: object, *more: Any) -> object:
    """Describes a tensor; ``more`` is requires_grad, hooks and metadata."""
    if not isinstance(storage, Storage):
        raise PickleError("a tensor has no storage")
    return _strided(storage, storage.dtype, offset, shape, strides, *more[2:])


def _rebuild_v3(
    storage: object, offset: object, shape: object, strides: object, grad: object, hooks: object,
    dtype: object, metadata: object = None,
) -> object:  # fmt: skip
    """Describes a tensor of another dtype than its storage."""
    if not isinstance(storage, Storage):
        raise PickleError("a tensor has no storage")
    return _strided(storage, _named("dtype", dtype), offset, shape, strides, metadata)


def _rebuild_quantised(
    storage: object, offset: object, shape: object, strides: object, *more: object
) -> object:
    """Describes a tensor by its integers; of how they are scaled nothing is kept."""
    return _rebuild(storage, offset, shape, strides)


def _rebuild_meta(dtype: object, shape: object, strides: object, grad: object) -> object:
    return _strided(None, _named("dtype", dtype), 0, shape, strides)


def _strided(
    storage: Storage | None, dtype: str, offset: object, shape: object, strides: object,
    metadata: object = None,
) -> Strided:  # fmt: skip
    if type(offset) is not int:
        raise PickleError("a tensor's offset is no number")
    pending = isinstance(metadata, dict) and any(metadata.values())
    return Strided(storage, dtype, offset, _numbers(shape), _numbers(strides), pending)


def _rebuild_sparse(layout: object, data: object) -> object:
    """Describes a sparse tensor: of the COO layout indices, values, size and perhaps a flag."""
    name = _named("layout", layout)
    parts = 2 if name == "torch.sparse_coo" else 3
    if not isinstance(data, tuple) or not all(isinstance(p, Strided) for p in data[:parts]):
        raise PickleError("a sparse tensor is damaged")
    return Sparse(name, data[:parts], _numbers(data[parts]))


def _rebuild_from_type(maker: object, kind: object, arguments: object, state: object) -> object:
    """Describes a tensor that had attributes, which are dropped."""
    if not isinstance(maker, _Maker) or not maker.tensor or not isinstance(arguments, tuple):
        raise PickleError("a tensor is made by no function of torch")
    return maker.make(*arguments)


def _parameter(data: object = OTHER, *more: object) -> object:
    return data


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(each) is int for each in value):
        raise PickleError("a tensor's shape or strides are no numbers")
    return value


def _named(kind: str, value: object) -> str:
    if not isinstance(value, _Name) or value.kind != kind:
        raise PickleError(f"a tensor's {kind} is none")
    return value.name


def _size(shape: object = ()) -> object:
    return _numbers(shape)


def _layout(name: object) -> object:
    if not isinstance(name, str):
        raise PickleError("a tensor's layout is none")
    return _Name("layout", name)


def _mapping(pairs: object = ()) -> dict[object, object]:
    """Makes a dict, also of pairs, as Python 2 wrote them."""
    made: dict[object, object] = {}
    if isinstance(pairs, dict):
        made.update(pairs)
    elif isinstance(pairs, list):
        for key, value in pairs:
            made[_key(key)] = value
    return made


def _defaultdict(factory: object = None, pairs: object = ()) -> dict[object, object]:
    return _mapping(pairs)


def _other(*arguments: object) -> object:
    return OTHER


def _key(value: object) -> object:
    """Returns a key for a dict: itself if it is text or a number, else one that nobody asks for."""
    return value if isinstance(value, (str, int, float, bytes, type(None))) else object()


def _globals() -> dict[tuple[str, str], object]:
    table: dict[tuple[str, str], object] = {
        ("torch._utils", "_rebuild_tensor"): _Maker(_rebuild, tensor=True),
        ("torch._utils", "_rebuild_tensor_v2"): _Maker(_rebuild, tensor=True),
        ("torch._utils", "_rebuild_tensor_v3"): _Maker(_rebuild_v3, tensor=True),
        ("torch._utils", "_rebuild_qtensor"): _Maker(_rebuild_quantised, tensor=True),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): _Maker(_rebuild_meta, tensor=True),
        ("torch._utils", "_rebuild_sparse_tensor"): _Maker(_rebuild_sparse, tensor=True),
        ("torch._utils", "_rebuild_parameter"): _Maker(_parameter, tensor=True),
        ("torch._utils", "_rebuild_parameter_with_state"): _Maker(_parameter, tensor=True),
        ("torch._tensor", "_rebuild_from_type_v2"): _Maker(_rebuild_from_type),
        ("torch.nn.parameter", "Parameter"): _Maker(_parameter),
        ("torch", "Size"): _Maker(_size),
        ("torch.serialization", "_get_layout"): _Maker(_layout),
        ("builtins", "dict"): _Maker(_mapping),
        ("__builtin__", "dict"): _Maker(_mapping),
        ("collections", "OrderedDict"): _Maker(_mapping),
        ("collections", "defaultdict"): _Maker(_defaultdict),
    }
    for name in ITEMSIZES:
        table["torch", name] = _Name("dtype", name)
    for module in ("torch", "torch.cuda", "torch.storage"):
        for name, dtype in _STORAGES.items():
            table[module, name] = _Name("storage", dtype)
    for module in (
        "pytorch_lightning.utilities.parsing",
        "lightning.fabric.utilities.data",
        "lightning.pytorch.utilities.parsing",
        "lightning_fabric.utilities.data",
    ):
        table[module, "AttributeDict"] = _Maker(_mapping)
    for module, names in _OTHERS.items():
        for name in names.split():
            table[module, name] = _Maker(_other)
    return table


_OTHERS = {  # beside the weights in real checkpoints; of their values nothing is kept
    "argparse": "Namespace",
    "builtins": "bool bytearray bytes complex float frozenset int list set slice str tuple",
    "__builtin__": "bool bytearray complex float frozenset int list long set slice str tuple",
    "_codecs": "encode",
    "collections": "Counter deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "numpy": "dtype ndarray bool_ float16 float32 float64 int8 int16 int32 int64 uint8",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "torch": "Tensor device per_tensor_affine per_tensor_symmetric per_channel_affine"
    " per_channel_symmetric per_channel_affine_float_qparams",
}
_GLOBALS = _globals()


def load(stream: IO[bytes], storages: dict[str, Storage] | None = None) -> object:
    """Reads one pickle.

    Args:
        stream: Where it begins; behind it afterwards.
        storages: Gets every storage that it names, by key.

    Returns:
        Containers, text and numbers as Python's; tensors as `Strided` and `Sparse`; sets and all
        that is not looked into as `Other`.

    Raises:
        ForbiddenError: If it names a global that is neither a tensor nor a container.
        PickleError: If it asks for anything else that no state dict needs.
        DamagedError: If it is cut off or is none.
    """
    machine = _Machine({} if storages is None else storages)
    try:
        for opcode, argument, _ in pickletools.genops(stream):  # it takes bytes apart, no more
            machine.step(opcode.name, argument)
        return machine.pop()
    except PickleError:
        raise
    except Exception as error:  # a pickle is damaged in as many ways as it can be written
        raise DamagedError from error


class _Machine:
    """Runs the instructions of one pickle."""

    def __init__(self, storages: dict[str, Storage]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under each mark
        self._memo: dict[int, Any] = {}
        self._steps = self._copied = 0

    def step(self, opcode: str, argument: Any) -> None:
        """Runs an instruction."""
        self._steps += 1
        if opcode in _PUSHED:
            self._stack.append(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode]())
        elif opcode in _STEPS:
            _STEPS[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"it has the instruction {opcode}, which no state dict needs")

    def pop(self) -> Any:
        """Takes the topmost object off the stack."""
        return self._stack.pop()

    def _mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _drop(self, _: None) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _drop_mark(self, _: None) -> None:
        self._pop_mark()

    def _double(self, _: None) -> None:
        self._stack.append(self._stack[-1])

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _tuple(self, _: None) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _top_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _list(self, _: None) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _dict(self, _: None) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._set(items)

    def _frozen_set(self, _: None) -> None:
        self._pop_mark()
        self._stack.append(OTHER)

    def _append(self, _: None) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self, _: None) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif target is not OTHER:
            raise PickleError("it appends to what is no list")

    def _set_item(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self, _: None) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[_key(key)] = value
        elif target is not OTHER:
            raise PickleError("it sets items of what is no dict")

    def _global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        self._look_up(module, attribute)

    def _stack_global(self, _: None) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(attribute) is not str:
            raise PickleError("it names a global by what is no text")
        self._look_up(module, attribute)

    def _look_up(self, module: str, attribute: str) -> None:
        found = _GLOBALS.get((module, attribute))
        if found is None:
            name = f"{module}.{attribute}"
            raise ForbiddenError(
                f"it holds {ascii(name[:80])[1:-1]}, which is neither a tensor nor a plain"
                " container and could run code"
            )
        self._stack.append(found)

    def _call(self, _: None) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if not isinstance(maker, _Maker) or type(arguments) is not tuple:
            raise PickleError("it calls what is no function")
        self._copied += sum(len(each) for each in arguments if isinstance(each, (list, dict)))
        if self._copied > self._steps:
            raise PickleError("it copies the same items again and again")
        self._stack.append(maker.make(*arguments))

    def _call_with_names(self, _: None) -> None:
        if self._stack.pop():
            raise PickleError("it calls a function with arguments by name")
        self._call(None)

    def _build(self, _: None) -> None:
        self._stack.pop()  # of an OrderedDict its _metadata, of others what is not looked into
        if not isinstance(self._stack[-1], (dict, Other)):
            raise PickleError("it gives a state to what has none")

    def _storage(self, _: None) -> None:
        """Takes ("storage", type, key, device, count) and perhaps (key, first, count) of a part."""
        kind, dtype, key, _device, count, *part = self._stack.pop()
        if kind != "storage" or type(key) is not str or type(count) is not int or count < 0:
            raise PickleError("it asks for what is no storage")
        whole = Storage(key, _named("storage", dtype), 0, count)
        first = self._storages.setdefault(key, whole)
        if _bytes(first) != _bytes(whole):
            raise PickleError("a storage has two sizes")
        if part and part[0] is not None:
            _, begin, count = part[0]
            if type(begin) is not int or type(count) is not int or begin < 0 or count < 0:
                raise PickleError("a part of a storage is damaged")
            whole = Storage(key, whole.dtype, begin, count)
        self._stack.append(whole)


def _bytes(storage: Storage) -> int:
    return storage.count * ITEMSIZES[storage.dtype]


_PUSHED = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING"
    " UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
    " BYTEARRAY8".split()
)
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": _other,
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "POP": _Machine._drop,
    "POP_MARK": _Machine._drop_mark,
    "DUP": _Machine._double,
    "PUT": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._put,
    "GET": _Machine._get,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "TUPLE": _Machine._tuple,
    "TUPLE1": lambda machine, _: machine._top_tuple(1),
    "TUPLE2": lambda machine, _: machine._top_tuple(2),
    "TUPLE3": lambda machine, _: machine._top_tuple(3),
    "LIST": _Machine._list,
    "DICT": _Machine._dict,
    "FROZENSET": _Machine._frozen_set,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._appends,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._call,
    "NEWOBJ": _Machine._call,
    "NEWOBJ_EX": _Machine._call_with_names,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._storage,
}
