"""A graph of ATen ops is cut: what has kernels becomes programs, as few as can be.

bridge/dynamo.py cuts graphs for inference, whose weights are known; bridge/training.py those of a
step forward and backward, which are given the weights. These have hundreds of kernels, so a large
one is divided again, into pieces that are compiled side by side, each in a process of its own.
"""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from max.driver import Device
from max.graph import DeviceRef
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from maxvision.bridge.coverage import Coverage, coverage
from maxvision.bridge.fx import module_of, origin, size_of, type_of
from maxvision.bridge.importer import Known, Missing, Unsupported
from maxvision.bridge.tensors import OnTensors, Step, place_of, turned
from maxvision.bridge.walker import Walker
from maxvision.common import memory
from maxvision.common.errors import ModelError, UserError
from maxvision.common.host import cores
from maxvision.graphs import lower, passes
from maxvision.graphs.layers import macs
from maxvision.graphs.net import Value
from maxvision.graphs.program import Program, in_dtype
from maxvision.runtime import cache
from maxvision.runtime.executor import Executor, Lowering, Unchecked

log = logging.getLogger("maxvision")

_COMPILER = 3 << 30
"""Bytes that a process takes to compile a part; it keeps little more than a core busy."""
_LEAST = 24
"""Ops that compute in a piece of a part, at the least: to compile one begins with 12 s."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What activations may be; the last one on a CPU."""
CHANNELS_LAST = (0, 2, 3, 1)
LAST = "channels last"
"""Marks nodes whose images lie so, though torch would have them as [N, C, H, W]."""
UNASKED = "it is not among the ops asked for"


def at_once() -> int:
    """Counts the parts that are compiled at a time: one a core, if there is the memory."""
    return max(1, min(cores(), memory.limit() // _COMPILER))


_COMPILERS = ThreadPoolExecutor(at_once(), thread_name_prefix="maxvision compiles")
"""Each waits for a process that compiles a part."""


@dataclass
class Explanation:
    """What became of a model's graphs.

    Attributes:
        parts: What our kernels compute: a coverage for each program, in the order in which they
            run.
        ours: The kind of each op of torch that these compute, and its module; see ``kind_of``.
        left: The ops that torch runs, and why.
        whole: Why torch runs all of a graph; one sentence each.
    """

    parts: list[Coverage] = field(default_factory=list)
    ours: list[tuple[str, str]] = field(default_factory=list)
    left: list[Missing] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = sum(each.macs for each in self.parts)
        programs = several(len(self.parts), "program")
        lines = [f"{programs} on our kernels, {total / 1e9:.2f} GMAC"]
        for each in self.parts:
            ops = ", ".join(f"{op} {n}" for op, n in each.kernels.most_common())
            lines.append(f"  {ops or 'nothing but copies'}")
        lines.append(f"{several(len(self.left), 'op')} in torch{':' * bool(self.left)}")
        lines += [f"  {each.op} at {each.origin or 'an unknown line'}: {each.why}"
                  for each in self.left]  # fmt: skip
        lines += [f"a graph in torch: {why}" for why in self.whole]
        return "\n".join(lines)


def leave(told: Explanation, error: Exception, *, run: bool) -> None:
    """Notes why torch runs a graph; warns of it where the graph is run."""
    why = str(error)
    if not isinstance(error, UserError):
        why = f"an internal error, please report it ({type(error).__name__}: {error})"
    told.whole.append(why)
    if run:
        warnings.warn(f"backend maxvision leaves a graph to torch: {why}", stacklevel=3)


def several(count: int, what: str) -> str:
    """Counts something, in the plural where it has to be."""
    return f"{count} {what}{'s' * (count != 1)}"


_ALIASES = {
    "convolution": "conv2d", "conv_transpose2d": "conv2d", "addmm": "linear", "mm": "linear",
    "matmul": "bmm", "scaled_dot_product_attention": "attention",
    "attention_logsumexp": "attention", "attend": "attention",
}  # fmt: skip
_PRODUCTS = frozenset(_ALIASES.values())


def kind_of(op: Any) -> str:
    """Says what kind an ATen op is of, as users call it: ``conv2d``; its gradient is too."""
    name = str(op).split(".")[1]
    ends = r"_(legit|with_indices|functional|no_training|backward|data)"
    name = re.sub(rf"^_?(native_)?|({ends})+$", "", name)
    return _ALIASES.get(name, name)


def is_product(op: Any) -> bool:
    """Tells whether an ATen op multiplies tensors along an axis: all the FLOPs are in these."""
    return isinstance(op, torch._ops.OpOverload) and kind_of(op) in _PRODUCTS


def cut(
    module: fx.GraphModule,
    weights: Mapping[str, Known],
    device: Device,
    told: Explanation,
    *,
    exact: bool = False,
    only: Collection[str] | None = None,
    pieces: int = 1,
) -> tuple[fx.GraphModule, list[Part]]:
    """Replaces what has kernels by programs.

    Args:
        module: The graph.
        weights: Its inputs that are known, by name.
        device: Where the tensors are.
        told: Where to say what became of it.
        exact: Whether values keep torch's dtypes, as where float32 and bfloat16 are mixed.
        only: The kinds of ops that programs may have, beside those that compute nothing; see
            ``kind_of``. Any if None.
        pieces: How many programs a large part may be divided into, to compile them side by side;
            below 2 none is.

    Returns:
        The graph, and its parts that are programs, which are not compiled yet.
    """
    dtype = dtype_of(module)
    if dtype == torch.float64 and not device.is_host:
        raise ModelError(
            "it is float64, which only a CPU computes in; move it to one, or to float32"
        )
    look = _Look(weights, exact, dtype)
    look.walk(module)
    look.store()
    if only is not None:
        look.leave(only)
    constants = {node.name: look.env[node] for node in module.graph.find_nodes(op="get_attr")}
    known = {**weights, **{n: x for n, x in constants.items() if isinstance(x.values[0], Tensor)}}
    supported = _Supported(dtype, look.absent, exact, known)
    look.absent |= supported.others(module)
    cutter = CapabilityBasedPartitioner(module, supported, allows_single_node_partition=True)
    whole = cutter.propose_partitions()
    divided = [piece for each in whole for piece in _divided(each, look.computing, pieces)]
    module = cutter.fuse_partitions(divided, prefix="part_")
    if exact:
        _lay(module)
    reasons = {node.name: why for node, why in look.absent.items()}
    found, parts = Explanation(), []
    for node in module.graph.nodes:
        if node.op == "call_module":
            inner = module.get_submodule(str(node.target))
            assert isinstance(inner, fx.GraphModule)
            names = [each.name for each in node.args]
            part = Part(inner, names, known, dtype, device, exact)
            if macs(part.program) or (only is not None and part.ops):
                node.args = tuple(node.args[i] for i in part.taken)
                parts.append(part)
                found.parts.append(part.coverage())
                found.ours += part.ops
                module.set_submodule(str(node.target), part)
            elif only is None:  # to compile it takes longer than it saves
                as_torch_has_them(inner)
                found.left += [
                    Missing(str(each.target), "no layer is beside it", origin(each))
                    for each in inner.graph.nodes
                    if each.op == "call_function"
                ]
        elif node.name in reasons:
            found.left.append(reasons[node.name])
    module.recompile()
    told.parts += found.parts
    told.ours += found.ours
    told.left += found.left
    return module, parts


def may_lie_last(node: Any) -> bool:
    """Tells whether a node gives images [N, C, H, W] as torch has them by default."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_contiguous()


def _lay(module: fx.GraphModule) -> None:
    """Lets images that go from program to program lie channels last, as kernels read and write.

    ``LAST`` may mark inputs of the graph already, and what is kept for another one.
    """
    inner = {node: module.get_submodule(str(node.target))
             for node in module.graph.find_nodes(op="call_module")}  # fmt: skip
    for node, part in inner.items():
        (last,) = part.graph.find_nodes(op="output")  # type: ignore[union-attr, operator]
        single = not isinstance(last.args[0], (list, tuple))
        for user in [node] if single else [*node.users]:
            made = last.args[0] if single else last.args[0][user.args[1]]
            if may_lie_last(made) and all(each in inner for each in user.users):
                made.meta[LAST] = True
            user.meta[LAST] = isinstance(made, fx.Node) and bool(made.meta.get(LAST))
    for node, part in inner.items():
        for given, name in zip(node.args, part.graph.find_nodes(op="placeholder"), strict=True):  # type: ignore[union-attr, operator]
            name.meta[LAST] = bool(given.meta.get(LAST))
    as_torch_has_them(module, [*inner])


def as_torch_has_them(module: fx.GraphModule, but: Collection[fx.Node] = ()) -> None:
    """Copies images that lie channels last for ops of torch, which may view them.

    Args:
        module: A graph.
        but: Nodes that read them as they lie.
    """
    for node in [*module.graph.nodes]:
        readers = [user for user in node.users if user not in but and user.op != "output"]
        if node.meta.get(LAST) and readers and node.op != "call_module":
            with module.graph.inserting_after(node):
                kind: Any = {"memory_format": torch.contiguous_format}
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,), kind)
            copy.meta["val"] = node.meta.get("val")
            for user in readers:
                user.replace_input_with(node, copy)
    module.recompile()


def _divided(part: Partition, computing: Sequence[fx.Node], pieces: int) -> list[Partition]:
    """Divides a part, in the order of the graph, so that each piece begins with a product."""
    places = {node for node in computing if node in part.nodes}
    pieces = min(pieces, len(places) // _LEAST)
    if pieces < 2:
        return [part]
    graph = next(iter(part.nodes)).graph
    found = [Partition()]
    held: dict[fx.Node, Partition] = {}
    count = 0
    for node in (each for each in graph.nodes if each in part.nodes):
        if node.target is operator.getitem:  # it goes with what gives several
            held[node.args[0]].add_node(node)
            continue
        if is_product(node.target) and count >= len(found) * len(places) / pieces:
            found.append(Partition())
        count += node in places
        found[-1].add_node(node)
        held[node] = found[-1]
    return found


def load(parts: Sequence[Part]) -> None:
    """Compiles parts of a graph: several at a time, in processes of their own.

    Raises:
        UserError: If one cannot be compiled.
    """
    for part in parts:
        part.begin(apart=len(parts) > 1)
    for number, part in enumerate(parts, 1):
        part.finish()
        log.info("program %d of %d is ready", number, len(parts))


def missing(module: fx.GraphModule) -> list[Missing]:
    """Lists the ops of a graph without weights that have no rule, with exact dtypes."""
    look = _Look({}, True, dtype_of(module))
    look.walk(module)
    return look.missing


class _Look(Walker):
    """Walks a graph, or a part of one.

    Attributes:
        computing: The nodes that are more than moves of numbers.
    """

    def __init__(self, weights: Mapping[str, Known], exact: bool, dtype: torch.dtype) -> None:
        super().__init__("graph", {each.name for each in weights.values()})
        self.weights = weights
        self.exact = exact
        self.floats = "float64" if dtype == torch.float64 else "float32"
        self.computing: list[fx.Node] = []

    def walk(self, module: fx.GraphModule) -> None:
        """Walks it; nodes that are no tensors are sizes."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.place(node, self.weights.get(node.name))
            else:
                before = len(self.net.nodes)
                self.visit(node, module)
                if self.exact and node in self.env:
                    self.env[node] = self.typed(self.env[node], node.meta.get("val"))
                if any(made.op not in lower.MOVES for made in self.net.nodes[before:]):
                    self.computing.append(node)

    def typed(self, found: Any, wanted: Any) -> Any:
        """Makes floats those of torch, where a rule gives what it computed with."""
        if isinstance(found, list) and isinstance(wanted, (list, tuple)):
            return [self.typed(*pair) for pair in zip(found, wanted, strict=True)]
        if not isinstance(found, Value) or not isinstance(wanted, Tensor):
            return found
        dtype = type_of(wanted).dtype
        floats = "float" in found.type.dtype and "float" in dtype
        differs = floats and found.type.dtype != dtype
        return self.net.op("cast", [found], dtype=dtype) if differs else found

    def place(self, node: fx.Node, weight: Known | None) -> None:
        """Makes an input of the graph a weight, a size or an input of the program."""
        value = node.meta["val"]
        if weight is not None:  # what torch computes of it, it computes on the CPU
            self.env[node] = Known(tuple(each.cpu() for each in weight.values), weight.name)
        elif isinstance(value, Tensor):
            kind = type_of(value)  # floats as those of weights; ``in_dtype`` says what they are
            floats = value.is_floating_point() and not self.exact
            dtype = self.floats if floats else kind.dtype
            order = _order(node)
            lies = self.net.input(_given(node), [kind.shape[axis] for axis in order], dtype)
            self.env[node] = _permuted(lies, _back(order))
        else:
            self.env[node] = size_of(value)

    def store(self) -> None:
        """Leaves to torch what no input decides and no program can hold."""
        for node, found in [*self.env.items()]:
            if isinstance(found, Known) and len(found.values) > 1:
                try:
                    self.value(found)
                except Unsupported as why:
                    self.net.origin = origin(node)
                    self.miss(node, str(why))

    def leave(self, only: Collection[str]) -> None:
        """Leaves to torch what computes something and is of no such kind."""
        for node in self.computing:
            if kind_of(node.target) not in only:
                why = Missing(str(node.target), UNASKED, origin(node))
                self.absent.setdefault(node, why)


def _given(node: fx.Node) -> str:
    """Names an input as no op is called."""
    return f"given.{node.name}"


class _Supported(OperatorSupportBase):
    """Says which nodes may be in a program: those that were translated, of one float dtype.

    Args:
        dtype: It.
        absent: The nodes that were not translated.
        exact: Whether dtypes may be mixed; see ``cut``.
        known: The weights, which are cast when they are packed.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        absent: Container[fx.Node],
        exact: bool,
        known: Container[str] = (),
    ) -> None:
        self._absent = absent
        self._mixed = DTYPES[:-1] if exact and dtype != torch.float64 else (dtype,)
        self._known = known

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """See above; torch calls this."""
        tensors = list(_tensors(node))
        return (
            node.op == "call_function"
            and node not in self._absent
            and bool(tensors)
            and not self._other(node)
        )

    def others(self, module: fx.GraphModule) -> dict[fx.Node, Missing]:
        """Says of which nodes the dtype is another one than that of programs."""
        found = {}
        for node in module.graph.nodes:
            if node.target is operator.getitem or not any(True for _ in _tensors(node)):
                continue
            if node.op == "call_function" and (dtype := self._other(node)):
                names = " or ".join(str(x).removeprefix("torch.") for x in self._mixed)
                why = f"a tensor is {str(dtype).removeprefix('torch.')}, and programs are {names}"
                found[node] = Missing(str(node.target), why, origin(node))
        return found

    def _other(self, node: fx.Node) -> torch.dtype | None:
        """Gives the dtype of a number in or out that no program holds; a cast has two."""
        given = (each for each in node.all_input_nodes if each.name not in self._known)
        for x in (each for value in (node, *given) for each in _tensors(value)):
            if (x.is_floating_point() or x.is_complex()) and x.dtype not in self._mixed:
                return x.dtype
        return None


def dtype_of(module: fx.GraphModule) -> torch.dtype:
    """Finds in what most nodes of a graph compute."""
    kinds = [x.dtype for node in module.graph.nodes for x in _tensors(node)]
    return max(DTYPES, key=kinds.count)


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    """Gives what a node computes, but for what nobody reads: a norm's statistics are float32."""
    found = node.meta.get("val")
    if isinstance(found, (list, tuple)):
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        several = [each for i, each in enumerate(found) if i in read]
    else:
        several = [found]
    return (each for each in several if isinstance(each, Tensor))


class Part(nn.Module):
    """A part of a graph on our kernels.

    Args:
        module: The part.
        names: What each of its inputs is called in the graph.
        weights: Of the graph, by those names.
        dtype: What it computes in.
        device: Where it runs.
        exact: See ``cut``.

    Attributes:
        program: It.
        ops: The kind of each op of torch that it computes, and its module; no mere moves.
        taken: Which of its inputs are not weights, nor sizes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        names: Sequence[str],
        weights: Mapping[str, Known],
        dtype: torch.dtype,
        device: Device,
        exact: bool,
    ) -> None:
        super().__init__()
        self._graph = module
        self._exact = exact
        self._floats = dtype
        self._dtype = str(dtype).removeprefix("torch.")
        self._device = device
        inputs = module.graph.find_nodes(op="placeholder")
        self._held = {
            node.name: weights[name]
            for node, name in zip(inputs, names, strict=True)
            if name in weights
        }
        (last,) = module.graph.find_nodes(op="output")
        self._single = not isinstance(last.args[0], (list, tuple))
        self._returned: list[fx.Node] = [last.args[0]] if self._single else [*last.args[0]]
        self._orders = [_order(node) for node in self._returned]
        self.translate()
        self.taken = [i for i, node in enumerate(inputs) if _given(node) in self.program.inputs]
        self._lie = [_order(inputs[i]) for i in self.taken]
        self._backs = [_back(order) for order in self._orders]
        self._run: OnTensors | Step | None = None
        self._loading: Future[None] | None = None

    def translate(self) -> None:
        """Makes its program, with the weights as they are now."""
        walker = _Look(self._held, self._exact, self._floats)
        walker.walk(self._graph)
        assert not walker.missing, walker.missing
        found = [walker.env[node] for node in self._returned]
        self._constants: dict[int, Tensor] = {}
        for i, node in enumerate(self._returned):
            if self._exact and _is_constant(found[i]) and not all(map(_is_constant, found)):
                constant = found[i].values[0].to(place_of(self._device), node.meta["val"].dtype)
                self._constants[i] = turned(constant, self._orders[i]).contiguous()
                continue
            value = walker.value(found[i])
            wanted = str(node.meta["val"].dtype).removeprefix("torch.")
            if self._exact and value.type.dtype != wanted:  # of weights, which are float32
                value = walker.net.op("cast", [value], dtype=wanted)
            walker.net.output(f"y{i}", _permuted(value, self._orders[i]))
        program = walker.net.program()
        self.program: Program = program if self._exact else in_dtype(program, self._dtype)
        self._tensors = walker.tensors
        self.ops = [(kind_of(node.target), module_of(node)) for node in walker.computing]

    def coverage(self) -> Coverage:
        """Says what computes it."""
        place = DeviceRef.from_device(self._device)
        final = passes.run(self.program, lower.backend(place, self._dtype))
        return coverage(self.program, final)

    @property
    def called(self) -> frozenset[str]:
        """The ops of ours that it calls."""
        place = DeviceRef.from_device(self._device)
        graph, *_ = self._lowering.build(self.program, self._tensors, place, Unchecked())
        return cache.called(str(graph))

    @property
    def _lowering(self) -> Lowering:
        return Lowering(self._dtype, tf32=_tf32())

    def load(self, *, apart: bool = False) -> None:
        """Compiles it if need be, perhaps in a process of its own, and packs its weights."""
        made = Executor.compile(
            self.program, self._tensors, self._device, self._lowering, images=0, apart=apart
        )
        if self._exact:
            turns = [back for i, back in enumerate(self._backs) if i not in self._constants]
            self._run = Step(made.executable, self._device, turns)
        else:
            self._run = OnTensors(made.executable, self._device)

    def begin(self, *, apart: bool) -> None:
        """Loads it beside what comes next; who calls it first waits for that."""
        self._loading = _COMPILERS.submit(self.load, apart=apart)

    def finish(self) -> None:
        """Waits until it is compiled; raises what went wrong."""
        if self._loading is not None:
            self._loading.result()

    def forward(self, *given: Any) -> Any:
        """Computes the outputs."""
        if self._run is None:
            self.finish()
        assert self._run is not None
        lies = (turned(x, order) for x, order in zip(given, self._lie, strict=True))
        made = self._run(*(x if x.is_contiguous() else x.contiguous() for x in lies))
        if not self._exact:
            made = list(map(turned, made, self._backs))
        for i, constant in self._constants.items():  # in their order
            made.insert(i, turned(constant.clone(), self._backs[i]))
        return made[0] if self._single else made


def _tf32() -> bool:
    """Says whether torch may round float32 to TF32 on a GPU, in products and in convolutions."""
    return torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


def _order(node: fx.Node) -> tuple[int, ...]:
    """Gives the axes in the order in which they lie in memory: torch's, unless it was changed."""
    if node.meta.get(LAST):
        return CHANNELS_LAST
    value = node.meta["val"]
    return tuple(sorted(range(value.ndim), key=lambda axis: -_number(value.stride(axis))))


def _permuted(x: Value, order: Sequence[int]) -> Value:
    return x if list(order) == sorted(order) else x.net.permute(x, *order)


def _is_constant(x: Any) -> bool:
    """Tells whether no input decides an output, which a program for a GPU cannot give."""
    return isinstance(x, Known) and len(x.values) == 1


def _back(order: Sequence[int]) -> tuple[int, ...]:
    """Gives the permutation that undoes one."""
    return tuple(order.index(axis) for axis in range(len(order)))


def _number(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)
