"""What was compiled before, by the content that it was compiled from.

MAX keeps the results of its compiler too, but asks for them with a graph that was checked against
the compiled ops, and compiling these takes four seconds at every start. A graph that is found here
needs neither: its text, the ops' sources, the target and MAX's version name its file.

The files lie in a folder of MAX's own cache, and go with it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from max._core.engine import max_cache_dir
from max.engine import CompiledModel
from max.engine import __version__ as max_version
from max.graph import Graph
from mojo.run import subprocess_run_mojo

from maxvision.common.arguments import meant
from maxvision.common.console import way_to
from maxvision.common.errors import ModelError, UserError
from maxvision.common.host import reason
from maxvision.graphs.nodes import OPS
from maxvision.graphs.target import Target

KEPT = 64
"""Files of each kind that are kept; the least recently used go first."""

ROOM = 32 << 20
"""Bytes that a compilation may leave in MAX's caches; ResNet-50's leaves 16 MB."""

Ops = frozenset[str] | None
"""Names of ops; None stands for all."""
LISTS = (Path("__init__.mojo"), Path("gpu.mojo"))
"""The modules that import ops and nothing else."""

_DIGEST = hashlib.sha256().digest_size
_IMPORT = re.compile(r"^from (\.+)([\w.]*) import", re.MULTILINE)
_REGISTERED = re.compile(r'^@register\("(\w+)"\)', re.MULTILINE)
_CALLED = re.compile(r'mo\.custom \[symbol = "(\w+)"')


def library(ops: Ops = None, *, gpu: bool) -> Path:
    """Returns the ops for ``Graph(custom_extensions=...)``: compiled, if there is a cache.

    Args:
        ops: Those that are needed, by the names that graphs call them; None for all. The library
            may have more: all, if that one is compiled already.
        gpu: Whether with the kernels for GPUs: without, it takes less than half of the time.

    Raises:
        ModelError: If there is no compiler.
    """
    folder = _folder()
    if folder is None:
        return OPS
    # MAX reads all of a library's folder: the drafts, which come and go, are in another one.
    whole, path = (
        folder / "ops" / f"mojo_pkg_{_sources(some, gpu)[:32]}.mojoc"  # the stem names the package
        for some in (None, ops)
    )
    for found in (path, whole):
        if found.is_file():
            _touch(found)
            return found
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        made = _precompiled(Path(draft), path.name, ops, gpu)
        path.parent.mkdir(exist_ok=True)
        made.replace(path)
    _prune(path.parent, "*.mojoc")
    return path


def build(path: Path, ops: Ops = None, *, gpu: bool) -> list[str]:
    """Compiles ops into a package that MAX loads wherever it is put.

    Args:
        path: What to write, a .mojoc; it appears when it is complete.
        ops: Those that are wanted, by the names that they are registered by; None for all.
        gpu: Whether with the kernels for GPUs.

    Returns:
        The ops in it: all of the modules that have those wanted.

    Raises:
        ModelError: If there is no compiler, no such op, or none for a CPU.
    """
    every = registered(gpu=gpu)
    if ops is not None and not ops:
        raise ModelError("no op is named; leave out --ops for all")
    for name in sorted((ops or frozenset()).difference(every)):
        if name in registered(gpu=True):
            raise ModelError(f"{name} has no kernel for a CPU; leave out --cpu")
        raise ModelError(f"there is no op {name}{meant(name, every)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = tempfile.mkdtemp(dir=path.parent, prefix=".")
    except OSError as error:
        raise ModelError(f"cannot write {path}: {reason(error)}") from None
    try:
        _precompiled(Path(draft), path.name, ops, gpu).replace(path)
    finally:
        shutil.rmtree(draft)
    return registered(ops, gpu=gpu)


def registered(ops: Ops = None, *, gpu: bool) -> list[str]:
    """Names the ops that a library of some has; None stands for all."""
    sources = modules(ops, gpu).values()
    return sorted({op for source in sources for op in _REGISTERED.findall(source.decode())})


def _precompiled(draft: Path, name: str, ops: Ops, gpu: bool) -> Path:
    """Compiles the modules of ops into a file of a folder."""
    made, copy = draft / name, draft / OPS.name
    for place, source in modules(ops, gpu).items():
        (copy / place).parent.mkdir(parents=True, exist_ok=True)
        (copy / place).write_bytes(source)
    try:
        done = subprocess_run_mojo(
            ["precompile", str(copy), "-o", str(made)], capture_output=True, text=True
        )
    except (OSError, RuntimeError):
        raise ModelError(
            "compiling needs the compiler of the package max, which is not here;"
            f" {way_to('')}, or use a model that maxvision compile has compiled"
        ) from None
    if done.returncode:
        raise RuntimeError(f"mojo precompile {OPS}: {done.stderr.strip()}")
    return made


def called(text: str) -> frozenset[str]:
    """Names the ops of ours that a graph calls, by its text."""
    return frozenset(_CALLED.findall(text))


def key(graph: Graph, target: Target) -> str:
    """Names what a graph compiles to, by all that has a part in it."""
    text = str(graph)
    sources = _sources(called(text), target.api != "cpu")
    parts = [text, sources, max_version, repr(target), repr(_settings(os.environ))]
    return _hash(part.encode() for part in parts)


def find(name: str) -> bytes | None:
    """Returns the compiled graph called ``name``, or None if there is none or it is damaged."""
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{name}.mef"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, mef = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(mef).digest() != digest:
        return None
    _touch(path)
    return mef


def lacks(name: str) -> bool:
    """Tells whether there is a cache that has no compiled graph called ``name``."""
    folder = _folder()
    return folder is not None and not (folder / f"{name}.mef").is_file()


def store(name: str, compiled: CompiledModel) -> bytes:
    """Keeps a compiled graph, if there is room for it, and returns its bytes."""
    folder = _folder()
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        path, kept = Path(draft) / "graph.mef", Path(draft) / "kept"
        compiled.export_mef(path)
        mef = path.read_bytes()
        if folder is not None:
            with suppress(OSError):  # a full disk: the next start compiles again
                kept.write_bytes(hashlib.sha256(mef).digest() + mef)
                kept.replace(folder / f"{name}.mef")
                _prune(folder, "*.mef")
    return mef


def compiled(graph: Graph, target: Target, compile: Callable[[], CompiledModel]) -> bytes:
    """Returns what ``graph`` compiles to for ``target``: found, or else compiled and kept.

    Raises:
        ModelError: If the compiler finds no room on the disk, or cannot compile the graph.
    """
    name = key(graph, target)
    if mef := find(name):
        return mef
    try:
        return store(name, compile())
    except UserError:
        raise
    except Exception as error:
        folder = max_cache_dir()
        if folder is not None and _free(folder) <= ROOM:
            raise ModelError(
                f"{folder}: compiling needs some {ROOM >> 20} MB here but the disk is full; free"
                " some space, or set MODULAR_CACHE_DIR to a folder on another disk"
            ) from None
        if not isinstance(error, RuntimeError):
            raise
        said = str(error.__cause__ or error)
        first = re.search(r"\berror: (.+)", said) or re.search(r"(.+)", said)
        raise ModelError(
            f"{graph.name}: MAX cannot compile the graph"
            f" ({first[1] if first else 'it does not say why'}); this is a fault of ours: please"
            " report it with what --debug shows"
        ) from error


def _free(folder: Path) -> float:
    """Returns the free bytes of a folder's disk, without end if they cannot be told."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.inf


def _folder() -> Path | None:
    """Makes the folder of the cache; None if it cannot be written."""
    parent = max_cache_dir()
    if parent is None:
        return None
    folder = parent / "maxvision"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _sources(ops: Ops, gpu: bool) -> str:
    """Digests the ops' sources, for a GPU or for a CPU, and the compiler's version."""
    read = modules(ops, gpu)
    names = (place.as_posix().encode() for place in read)
    return _hash([max_version.encode(), *names, *read.values()])


@cache
def modules(ops: Ops, gpu: bool) -> dict[Path, bytes]:
    """Reads the sources of ops by their places in the package.

    For a CPU modules called no_gpu are in the place of those called gpu, and no module is there
    that only the latter import.
    """
    found: dict[Path, bytes] = {}
    waiting = [Path("__init__.mojo")]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        without = place.name == "gpu.mojo" and not gpu
        source = (OPS / (place.with_name("no_gpu.mojo") if without else place)).read_text()
        if place in LISTS:
            lines = source.splitlines(keepends=True)
            source = "".join(line for line in lines if _wanted(_IMPORT.match(line), ops, gpu))
        found[place] = source.encode()
        for dots, name in _IMPORT.findall(source):
            module = place.parents[len(dots) - 1].joinpath(*name.split("."))
            if (OPS / module).is_dir():
                waiting.append(module / "__init__.mojo")
            else:
                waiting += [module.with_suffix(".mojo"), module.parent / "__init__.mojo"]
    return dict(sorted(found.items()))


def _wanted(imports: re.Match[str] | None, ops: Ops, gpu: bool) -> bool:
    """Says whether a line that lists ops is for a library; one that imports nothing is."""
    if not imports:
        return True
    if imports[2] == "gpu":
        return gpu
    return ops is None or bool(ops & _registered(imports[2].replace(".", "/")))


@cache
def _registered(name: str) -> set[str]:
    """Names the ops that a module of the package registers, or those in a folder of it."""
    folder = OPS / name
    sources = folder.glob("*.mojo") if folder.is_dir() else [folder.with_suffix(".mojo")]
    return {op for source in sources for op in _REGISTERED.findall(source.read_text())}


def _settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lists the settings of MAX that may change what it compiles."""
    others = re.compile("CACHE|^MODULAR_HOME$|MEMORY_MANAGER")
    return sorted(
        (name, value)
        for name, value in environment.items()
        if name.startswith("MODULAR_") and not others.search(name)
    )


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _prune(folder: Path, pattern: str) -> None:
    def used(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    for path in sorted(folder.glob(pattern), key=used)[:-KEPT]:
        path.unlink(missing_ok=True)
