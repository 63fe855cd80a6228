"""The backend of torch.compile: what our kernels compute of a model, and what torch computes.

    fast = torch.compile(model.eval(), backend="maxvision")
    with torch.no_grad():
        fast(x)
    print(explain(model, x))

torch finds the backend by its name in any process once maxvision is installed (the entry point
``torch_dynamo_backends`` in pyproject.toml). Each graph of TorchDynamo is exported with its weights
frozen. Where every op has a kernel, it is one program, the same that ``maxvision.convert`` makes.
Otherwise it is cut: connected ops that have kernels become programs, as few as can be, and torch
runs the others. Tensors go both ways without a copy, but for the layout.

It is for inference, on the CPU or the GPU where the tensors are. Where gradients are on, torch runs
the graph, and a warning says why, once.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx.traceback
from max.driver import Device
from max.graph import DeviceRef
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils._pytree import tree_unflatten

from maxvision.bridge.coverage import Coverage, coverage
from maxvision.bridge.exported import decomposed, first_line
from maxvision.bridge.fx import origin, size_of, type_of
from maxvision.bridge.importer import Known, Missing, Unsupported
from maxvision.bridge.tensors import OnTensors, device_of
from maxvision.bridge.walker import Walker
from maxvision.common.errors import ModelError, UserError
from maxvision.graphs import lower, passes
from maxvision.graphs.layers import macs
from maxvision.graphs.program import Program, in_dtype
from maxvision.runtime.executor import Executor, Lowering

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What activations may be."""
_VERSION = operator.attrgetter("_version")


@dataclass
class Explanation:
    """What became of a model's graphs.

    Attributes:
        parts: What our kernels compute: a coverage for each program, in the order in which they
            run.
        left: The ops that torch runs, and why.
        whole: Why torch runs all of a graph; one sentence each.
    """

    parts: list[Coverage] = field(default_factory=list)
    left: list[Missing] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = sum(each.macs for each in self.parts)
        programs = _several(len(self.parts), "program")
        lines = [f"{programs} on our kernels, {total / 1e9:.2f} GMAC"]
        for each in self.parts:
            ops = ", ".join(f"{op} {n}" for op, n in each.kernels.most_common())
            lines.append(f"  {ops or 'nothing but copies'}")
        lines.append(f"{_several(len(self.left), 'op')} in torch{':' * bool(self.left)}")
        lines += [f"  {each.op} at {each.origin or 'an unknown line'}: {each.why}"
                  for each in self.left]  # fmt: skip
        lines += [f"a graph in torch: {why}" for why in self.whole]
        return "\n".join(lines)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def backend(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a graph of TorchDynamo; torch calls this.

    Args:
        graph: It, whose parameters and buffers are among its inputs.
        example: Its inputs.
        options: Of ``torch.compile``; there are none.

    Raises:
        ModelError: If there are options.
    """
    if given := options.get("options", options):
        raise ModelError(f"backend maxvision of torch.compile has no option {min(given)}")
    return _Graph(graph, example, Explanation(), run=True)


def explain(model: Callable[..., Any], *inputs: Any) -> Explanation:
    """Says what ``torch.compile(model, backend="maxvision")`` computes where; compiles nothing.

    Args:
        model: A module or function of tensors, which is called once.
        inputs: What it takes.
    """
    found = Explanation()

    def look(graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        _Graph(graph, example, found, run=False)
        return graph.forward

    given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    for x in given:
        if isinstance(x, Tensor) and x.ndim:  # the batch, if its code lets it change
            torch._dynamo.maybe_mark_dynamic(x, 0)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=look)(*given)
    torch._dynamo.reset()
    return found


class _Graph:
    """A graph of TorchDynamo; a program for each set of sizes but the batch.

    Args:
        graph: The graph.
        example: Its inputs.
        told: Where to say what became of it.
        run: Whether it shall run, or only be looked at.
    """

    def __init__(
        self, graph: fx.GraphModule, example: Sequence[Any], told: Explanation, *, run: bool
    ) -> None:
        self._graph = graph
        self._told = told
        self._run = run
        self._made: dict[Any, Callable[..., Any]] = {}
        self._frozen: _Frozen | None = None
        try:
            self._frozen = _Frozen(graph, example)
        except UserError as error:
            self._left(str(error))
        else:
            self._make(self._frozen, example)

    def __call__(self, *arguments: Any) -> Any:
        """Computes the outputs; other sizes than before are compiled first."""
        if self._frozen is None:
            return self._graph(*arguments)
        made = self._made.get(self._frozen.key(arguments))
        return (made or self._make(self._frozen, arguments))(*arguments)

    def _make(self, frozen: _Frozen, example: Sequence[Any]) -> Callable[..., Any]:
        made = self._compiled(frozen, example)
        self._made[frozen.key(example)] = made  # which may have learned that the batch is fixed
        return made

    def _compiled(self, frozen: _Frozen, example: Sequence[Any]) -> Callable[..., Any]:
        try:
            with torch._guards.tracing(None), torch.no_grad():
                return _Compiled(frozen, example, self._told, self._run)
        except UserError as error:
            why = str(error)
        except Exception as error:  # the model still runs, in torch
            why = f"an internal error, please report it ({type(error).__name__}: {error})"
        self._left(why)
        return self._graph

    def _left(self, why: str) -> None:
        self._told.whole.append(why)
        if self._run:
            warnings.warn(f"backend maxvision leaves a graph to torch: {why}", stacklevel=2)


def _place(tensors: Sequence[Tensor]) -> torch.device:
    """Says where tensors are.

    Raises:
        ModelError: If they want gradients, or are not all on one device.
    """
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise ModelError("gradients are on; call it under torch.no_grad()")
    places = {each.device for each in tensors}
    if len(places) > 1:
        names = " and ".join(sorted(map(str, places)))
        raise ModelError(f"its tensors are on {names}; move them to one device")
    return places.pop() if places else torch.device("cpu")


class _Frozen(nn.Module):
    """A graph of TorchDynamo that holds its weights, and takes the other tensors.

    Attributes:
        held: The weights by their names in the model.
        taken: The inputs of the graph that are taken, by number.
        numbers: The inputs that are numbers of the model's code, such as the epsilon of a norm.
        batched: Of each that is taken, whether its first size is a batch that may change.
        device: Where the tensors are.

    Raises:
        ModelError: If it is none for this backend.
        DeviceError: If MAX finds no such GPU.
    """

    def __init__(self, graph: fx.GraphModule, example: Sequence[Any]) -> None:
        super().__init__()
        self.graph = self._given = graph
        self.weights = nn.Module()
        self.held: dict[str, Tensor] = {}
        self._plan: list[tuple[str, Any]] = []
        nodes = graph.graph.find_nodes(op="placeholder")
        pairs = list(zip(nodes, example, strict=True))
        self.taken = [
            i
            for i, (node, value) in enumerate(pairs)
            if isinstance(value, Tensor) and not _is_weight(node, value) and not _is_float(node)
        ]
        self.numbers = [i for i, node in enumerate(nodes) if _is_float(node)]
        tensors = [x for node, x in pairs if isinstance(x, Tensor) and not _is_float(node)]
        self.device = device_of(_place(tensors))
        sizes: dict[str, tuple[int, int]] = {}
        shapes = [nodes[i].meta["example_value"].shape for i in self.taken]
        for number, shape in enumerate(shapes):
            for axis, size in enumerate(shape):
                sizes.setdefault(str(size), (number, axis))
        first = [str(shape[0]) for shape in shapes if len(shape) and not isinstance(shape[0], int)]
        self.batched = [[str(size) for size in shape[:1]] == first[:1] != [] for shape in shapes]
        for i, (node, value) in enumerate(pairs):
            if i in self.taken:
                self._plan.append(("given", self.taken.index(i)))
            elif i in self.numbers:
                self._plan.append(("nothing", None))
            elif isinstance(value, Tensor):
                name = _path(node)
                self.held[name] = value.detach()
                _hold(self.weights, name, value.detach())
                self._plan.append(("held", name))
            elif (place := sizes.get(str(node.meta["example_value"]))) is not None:
                self._plan.append(("size", place))
            elif not node.users:
                self._plan.append(("nothing", None))
            else:
                raise ModelError(f"one of its inputs is a {type(value).__name__}")

    def forward(self, *given: Tensor) -> Any:
        """Computes what the graph does."""
        arguments: list[Any] = []
        for kind, what in self._plan:
            if kind == "given":
                arguments.append(given[what])
            elif kind == "held":
                arguments.append(self.get_buffer(f"weights.{what}"))
            elif kind == "size":
                arguments.append(given[what[0]].shape[what[1]])
            else:
                arguments.append(None)
        with fx.traceback.preserve_node_meta():  # the lines of the model's code
            return fx.Interpreter(self.graph).run(*arguments)

    def key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Gives what a program is made for: sizes, where they are not the batch, and numbers."""
        shapes = [arguments[i].shape for i in self.taken]
        sizes = (s[b:] for s, b in zip(shapes, self.batched, strict=True))
        return (*sizes, *(float(arguments[i]) for i in self.numbers))

    def exported(self, example: Sequence[Any]) -> ExportedProgram:
        """Exports it: with any batch, if all it takes begins with one, even if it is fixed here.

        Raises:
            ModelError: If sizes change that are no multiples of one batch.
        """
        given = tuple(example[i] for i in self.taken)
        self.graph = _with_numbers(self._given, {i: float(example[i]) for i in self.numbers})
        firsts = {tuple(each.shape[:1]) for each in given}
        if len(firsts) == 1 and max(*firsts, (0,)) > (1,):
            with contextlib.suppress(ModelError):  # its code takes this batch alone
                whole = self._exported(given, [True] * len(given))
                if len(_symbols(whole)) <= 1:
                    return whole
        whole = self._exported(given, self.batched)
        if len(_symbols(whole)) > 1:
            raise ModelError("several of its sizes change, which are not one batch")
        if not _symbols(whole):  # its code takes this batch alone
            self.batched = [False] * len(given)
        return whole

    def _exported(self, given: tuple[Tensor, ...], batched: Sequence[bool]) -> ExportedProgram:
        shapes = tuple({0: Dim.AUTO} if each else None for each in batched)
        try:
            return decomposed(self, given, (shapes,))
        except Exception as error:  # whatever the model's code raises
            raise ModelError(f"torch.export cannot trace it ({first_line(error)})") from error


def _symbols(whole: ExportedProgram) -> set[str]:
    """Names the sizes of inputs that are not known."""
    values = (node.meta["val"] for node in whole.graph.find_nodes(op="placeholder"))
    tensors = (each for each in values if isinstance(each, Tensor))
    return {str(size) for each in tensors for size in each.shape if not isinstance(size, int)}


def _with_numbers(graph: fx.GraphModule, numbers: Mapping[int, float]) -> fx.GraphModule:
    """Copies a graph with numbers in the place of inputs, each of which is read by ``item()``."""
    if not numbers:
        return graph
    made = copy.deepcopy(graph)
    nodes = made.graph.find_nodes(op="placeholder")
    for i, number in numbers.items():
        for read in list(nodes[i].users):
            for user in list(read.users):
                user.args = fx.map_arg(user.args, lambda x: number if x is read else x)  # noqa: B023
                user.kwargs = fx.map_arg(user.kwargs, lambda x: number if x is read else x)  # noqa: B023
            made.graph.erase_node(read)
    made.recompile()
    return made


def _is_float(node: fx.Node) -> bool:
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _is_weight(node: fx.Node, value: Tensor) -> bool:
    held = node.meta.get("tensor_dict") or {}
    return isinstance(value, nn.Parameter) or "_dynamo_static_input_type" in held


def _path(node: fx.Node) -> str:
    """Gives the path in the model of what an input is; the input's own name if it has none."""
    given = node.meta.get("grapharg")
    name = given.source.name if given is not None and given.source is not None else ""
    name = name() if callable(name) else name
    parts = re.findall(r"\['(\w+)'\]|\.(\w+)|\[(\d+)\]", name)
    path = [a or b or c for a, b, c in parts]
    skipped = ("_modules", "_parameters", "_buffers", "self")
    return ".".join(each for each in path if each not in skipped) or str(node.name)


def _hold(root: nn.Module, path: str, value: Tensor) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.register_buffer(name, value)


class _Compiled:
    """A graph that is cut into programs and what torch runs."""

    def __init__(
        self, frozen: _Frozen, example: Sequence[Any], told: Explanation, run: bool
    ) -> None:
        self.frozen = frozen
        self.whole = whole = frozen.exported(example)
        signature = whole.graph_signature
        if any(spec.kind.name != "USER_OUTPUT" for spec in signature.output_specs):
            raise ModelError("it changes its inputs or buffers; call eval() first")
        self._structure = whole.call_spec.out_spec  # which torch makes anew at each access
        self._inputs = [self._weight(spec) for spec in signature.input_specs]
        self._parts: list[_Part] = []
        self._cut(told, run)
        self._versions = self._seen()

    def _weight(self, spec: Any) -> Known | None:
        """Gives the weight or constant that an input of the exported graph is."""
        if spec.kind.name == "USER_INPUT":
            return None
        name = str(spec.target).removeprefix("weights.")
        held = self.frozen.held.get(name)
        return Known((self.whole.constants[spec.target] if held is None else held,), name)

    def _cut(self, told: Explanation, run: bool) -> None:
        """Replaces what has kernels by programs."""
        module = self.whole.graph_module
        nodes = module.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self._inputs, strict=True)
        weights = {node.name: weight for node, weight in pairs if weight is not None}
        look = _Look(weights)
        look.walk(module)
        look.store()
        supported = _Supported(module, look.absent)
        cutter = CapabilityBasedPartitioner(module, supported, allows_single_node_partition=True)
        module = cutter.fuse_partitions(cutter.propose_partitions(), prefix="part_")
        reasons = {node.name: why for node, why in look.absent.items()}
        found = Explanation()
        for node in module.graph.nodes:
            if node.op == "call_module":
                inner = module.get_submodule(str(node.target))
                assert isinstance(inner, fx.GraphModule)
                names = [each.name for each in node.args]
                part = _Part(inner, names, weights, supported.name, self.frozen.device)
                if macs(part.program):
                    node.args = tuple(node.args[i] for i in part.taken)
                    self._parts.append(part)
                    found.parts.append(part.coverage())
                    module.set_submodule(str(node.target), part)
                else:  # to compile it takes longer than it saves
                    found.left += [
                        Missing(str(each.target), "no layer is beside it", origin(each))
                        for each in inner.graph.nodes
                        if each.op == "call_function"
                    ]
            elif node.name in reasons:
                found.left.append(reasons[node.name])
        if run:
            for part in self._parts:
                part.load()
        nodes = module.graph.find_nodes(op="placeholder")
        held = [i for i, x in enumerate(self._inputs) if x is not None and not nodes[i].users]
        for i in held:  # by programs alone
            module.graph.erase_node(nodes[i])
        self._inputs = [x for i, x in enumerate(self._inputs) if i not in held]
        module.recompile()
        self._module = module
        told.parts += found.parts
        told.left += found.left

    def _seen(self) -> list[int]:
        return list(map(_VERSION, self.frozen.held.values()))

    def __call__(self, *arguments: Any) -> Any:
        """Runs it; weights that were changed in place since are packed anew."""
        if (versions := self._seen()) != self._versions:
            for part in self._parts:
                part.translate()
                part.load()
            self._versions = versions
        given = iter([arguments[i] for i in self.frozen.taken])
        inputs = [next(given) if each is None else each.values[0] for each in self._inputs]
        with torch.no_grad():
            returned = self._module(*inputs)
        return tree_unflatten(list(returned), self._structure)


class _Look(Walker):
    """Walks a graph, or a part of one."""

    def __init__(self, weights: Mapping[str, Known]) -> None:
        super().__init__("graph", {each.name for each in weights.values()})
        self.weights = weights

    def walk(self, module: fx.GraphModule) -> None:
        """Walks it; nodes that are no tensors are sizes."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.place(node, self.weights.get(node.name))
            else:
                self.visit(node, module)

    def place(self, node: fx.Node, weight: Known | None) -> None:
        """Makes an input of the graph a weight, a size or an input of the program."""
        value = node.meta["val"]
        if weight is not None:  # what torch computes of it, it computes on the CPU
            self.env[node] = Known(tuple(each.cpu() for each in weight.values), weight.name)
        elif isinstance(value, Tensor):
            kind = type_of(value)  # floats as those of weights; ``in_dtype`` says what they are
            dtype = "float32" if value.is_floating_point() else kind.dtype
            self.env[node] = self.net.input(_given(node), kind.shape, dtype)
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


def _given(node: fx.Node) -> str:
    """Names an input as no op is called."""
    return f"given.{node.name}"


class _Supported(OperatorSupportBase):
    """Says which nodes may be in a program: those that were translated, of one float dtype."""

    def __init__(self, module: fx.GraphModule, absent: Container[fx.Node]) -> None:
        self._absent = absent
        kinds = [x.dtype for node in module.graph.nodes for x in _tensors(node)]
        found = [kind for kind in kinds if kind in DTYPES]
        self.dtype = max(DTYPES, key=found.count)
        self.name = str(self.dtype).removeprefix("torch.")

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        """See above; torch calls this."""
        tensors = list(_tensors(node))
        return (
            node.op == "call_function"
            and node not in self._absent
            and bool(tensors)
            and all(x.dtype == self.dtype or not x.is_floating_point() for x in tensors)
        )


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    """Gives what a node computes, but for what nobody reads: a norm's statistics are float32."""
    found = node.meta.get("val")
    if isinstance(found, (list, tuple)):
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        several = [each for i, each in enumerate(found) if i in read]
    else:
        several = [found]
    return (each for each in several if isinstance(each, Tensor))


class _Part(nn.Module):
    """A part of a graph on our kernels.

    Args:
        module: The part.
        names: What each of its inputs is called in the graph.
        weights: Of the graph, by those names.
        dtype: What it computes in.
        device: Where it runs.

    Attributes:
        program: It.
        taken: Which of its inputs are not weights, nor sizes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        names: Sequence[str],
        weights: Mapping[str, Known],
        dtype: str,
        device: Device,
    ) -> None:
        super().__init__()
        self._graph = module
        self._dtype = dtype
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
        self._orders = [_order(node.meta["val"]) for node in self._returned]
        self.translate()
        self.taken = [i for i, node in enumerate(inputs) if _given(node) in self.program.inputs]
        self._run: OnTensors | None = None

    def translate(self) -> None:
        """Makes its program, with the weights as they are now."""
        walker = _Look(self._held)
        walker.walk(self._graph)
        assert not walker.missing, walker.missing
        for i, node in enumerate(self._returned):
            walker.net.output(f"y{i}", walker.value(walker.env[node]))
        self.program: Program = in_dtype(walker.net.program(), self._dtype)
        self._tensors = walker.tensors

    def coverage(self) -> Coverage:
        """Says what computes it."""
        place = DeviceRef.from_device(self._device)
        final = passes.run(self.program, lower.backend(place, self._dtype))
        return coverage(self.program, final)

    def load(self) -> None:
        """Compiles it if need be, and packs its weights."""
        lowering = Lowering(self._dtype, tf32=_tf32())
        made = Executor.compile(self.program, self._tensors, self._device, lowering, images=0)
        self._run = OnTensors(made.executable, self._device)

    def forward(self, *given: Any) -> Any:
        """Computes the outputs."""
        assert self._run is not None
        made = self._run(*(each.detach().contiguous() for each in given))
        found = [_laid_out(each, order) for each, order in zip(made, self._orders, strict=True)]
        return found[0] if self._single else found


def _tf32() -> bool:
    """Says whether torch may round float32 to TF32 on a GPU, in products and in convolutions."""
    return torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


def _order(value: Tensor) -> tuple[int, ...] | None:
    """Gives the axes in the order in which torch expects them in memory; None if as they are."""
    order = sorted(range(value.ndim), key=lambda axis: -_number(value.stride(axis)))
    return None if order == list(range(value.ndim)) else tuple(order)


def _number(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _laid_out(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    if order is None:
        return x
    return x.permute(order).contiguous().permute(*np.argsort(order).tolist())
