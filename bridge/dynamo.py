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

It computes on the CPU or the GPU where the tensors are. Where gradients are wanted, a graph becomes
two, a step forward and a step backward, which are cut alike (bridge/training.py); sizes are fixed
then (``dynamic=False``). What cannot be compiled is left to torch, and a warning says why, once.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_unflatten

from maxvision.bridge.exported import decomposed, first_line
from maxvision.bridge.importer import Known
from maxvision.bridge.parts import Explanation, cut, leave, load
from maxvision.bridge.tensors import device_of
from maxvision.common.errors import ModelError
from maxvision.graphs.types import BATCH

_VERSION = operator.attrgetter("_version")


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
    return compiled(graph, example, Explanation(), run=True)


def explain(model: Callable[..., Any], *inputs: Any, training: bool = False) -> Explanation:
    """Says what ``torch.compile(model, backend="maxvision")`` computes where; compiles nothing.

    Args:
        model: A module or function of tensors, which is called once.
        inputs: What it takes.
        training: Whether to look at a step of training, forward and backward, in place of
            inference. Call it under the same autocast.
    """
    found = Explanation()

    def look(graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        compiled(graph, example, found, run=False)
        return graph.forward

    given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    for x in given:
        if isinstance(x, Tensor) and x.ndim and not training:  # the batch, if its code allows it
            torch._dynamo.maybe_mark_dynamic(x, 0)
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    before = [each.clone() for each in buffers if training]  # the call counts as a step
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(model, backend=look, dynamic=False if training else None)(*given)
    torch._dynamo.reset()
    with torch.no_grad():
        for each, was in zip(buffers, before, strict=False):
            each.copy_(was)
    return found


def compiled(
    graph: fx.GraphModule,
    example: Sequence[Any],
    told: Explanation,
    *,
    run: bool,
    only: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph for inference, or for training where gradients are wanted.

    Args:
        graph: A graph of TorchDynamo.
        example: Its inputs.
        told: Where to say what became of it.
        run: Whether it shall run, or only be looked at.
        only: The kinds of ops that our kernels may compute; see ``cut``.
    """
    tensors = [each for each in example if isinstance(each, Tensor)]
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors):
        return _Graph(graph, example, told, run=run, only=only)
    from maxvision.bridge.training import trained

    try:
        return trained(graph, example, told, run=run, only=only)
    except Exception as error:  # the model still runs, in torch
        leave(told, error, run=run)
    return graph


class _Graph:
    """A graph of TorchDynamo; a program for each set of sizes but the batch.

    Args:
        graph: The graph.
        example: Its inputs.
        told: Where to say what became of it.
        run: Whether it shall run, or only be looked at.
        only: See ``cut``.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        example: Sequence[Any],
        told: Explanation,
        *,
        run: bool,
        only: Collection[str] | None,
    ) -> None:
        self._graph = graph
        self._told = told
        self._run = run
        self._only = only
        self._made: dict[Any, Callable[..., Any]] = {}
        self._frozen: _Frozen | None = None
        try:
            self._frozen = _Frozen(graph, example)
        except Exception as error:  # the model still runs, in torch
            leave(told, error, run=run)
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
                return _Compiled(frozen, example, self._told, self._run, self._only)
        except Exception as error:  # the model still runs, in torch
            leave(self._told, error, run=self._run)
        return self._graph


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
                whole = self._exported(given, [True] * len(given), Dim(BATCH))
                if len(_symbols(whole)) <= 1:
                    return whole
        whole = self._exported(given, self.batched)
        if len(_symbols(whole)) > 1:
            raise ModelError("several of its sizes change, which are not one batch")
        if any(yes and not kept for yes, kept in zip(self.batched, _open(whole), strict=True)):
            self.batched = [False] * len(given)  # its code takes this batch alone
            return self._exported(given, self.batched)
        return whole

    def _exported(
        self, given: tuple[Tensor, ...], batched: Sequence[bool], size: Any = Dim.AUTO
    ) -> ExportedProgram:
        """Exports it with the first size of some inputs open: each its own, or one for all."""
        shapes = tuple({0: size} if each else None for each in batched)
        try:
            return decomposed(self, given, (shapes,))
        except Exception as error:  # whatever the model's code raises
            raise ModelError(f"torch.export cannot trace it ({first_line(error)})") from error


def _symbols(whole: ExportedProgram) -> set[str]:
    """Names the sizes of inputs that are not known."""
    return {str(size) for x in _given(whole) for size in x.shape if not isinstance(size, int)}


def _open(whole: ExportedProgram) -> list[bool]:
    """Tells which inputs have a first size that is not known."""
    return [not all(isinstance(size, int) for size in x.shape[:1]) for x in _given(whole)]


def _given(whole: ExportedProgram) -> list[Tensor]:
    """Gives the inputs that its caller has to give."""
    names = whole.graph_signature.user_inputs
    nodes = whole.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in nodes if node.name in names]


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
        self,
        frozen: _Frozen,
        example: Sequence[Any],
        told: Explanation,
        run: bool,
        only: Collection[str] | None,
    ) -> None:
        self.frozen = frozen
        self.whole = whole = frozen.exported(example)
        signature = whole.graph_signature
        if any(spec.kind.name != "USER_OUTPUT" for spec in signature.output_specs):
            raise ModelError("it changes its inputs or buffers; call eval() first")
        self._structure = whole.call_spec.out_spec  # which torch makes anew at each access
        self._inputs = [self._weight(spec) for spec in signature.input_specs]
        self._cut(told, run, only)
        self._versions = self._seen()

    def _weight(self, spec: Any) -> Known | None:
        """Gives the weight or constant that an input of the exported graph is."""
        if spec.kind.name == "USER_INPUT":
            return None
        name = str(spec.target).removeprefix("weights.")
        held = self.frozen.held.get(name)
        return Known((self.whole.constants[spec.target] if held is None else held,), name)

    def _cut(self, told: Explanation, run: bool, only: Collection[str] | None) -> None:
        """Replaces what has kernels by programs, and compiles these."""
        module = self.whole.graph_module
        nodes = module.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self._inputs, strict=True)
        weights = {node.name: weight for node, weight in pairs if weight is not None}
        module, self._parts = cut(module, weights, self.frozen.device, told, only=only)
        if run:
            load(self._parts)
        nodes = module.graph.find_nodes(op="placeholder")
        held = [i for i, x in enumerate(self._inputs) if x is not None and not nodes[i].users]
        for i in held:  # by programs alone
            module.graph.erase_node(nodes[i])
        self._inputs = [x for i, x in enumerate(self._inputs) if i not in held]
        module.recompile()
        self._module = module

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
