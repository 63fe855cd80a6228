"""Our kernels inside a torch model that stays what it is.

    report = inject(model.eval(), ("conv2d", "linear"), validate=images)
    print(report)  # what runs where, the error, the times
    report.undo()

The model keeps its class, parameters, buffers and state_dict; calls of it run through the backend
of torch.compile (bridge/dynamo.py), whose programs have the named kinds of ops alone.
``python -m maxvision.bridge.inject`` shows it.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from maxvision.bridge import aten, gradients
from maxvision.bridge.dynamo import compiled
from maxvision.bridge.parts import Explanation, kind_of, several
from maxvision.bridge.sources import find
from maxvision.common.arguments import Parser, meant
from maxvision.common.console import complain, run_program
from maxvision.common.errors import ArgumentError, ModelError

CALLS = 5
"""Calls that are timed."""
SHOWN = 3
"""Modules that a report names of each kind of op."""
MODELS = ("transformers/resnet", "transformers/cvt", "timm/resnet18")
"""What is shown where no model is named."""


@dataclass
class Injection:
    """What became of a model.

    Attributes:
        replaced: The modules whose ops our kernels compute, for each kind; once for each op.
        left: How often torch runs an op, by its name and why.
        whole: Why torch runs all of a graph.
        programs: How many programs there are.
        error: The largest difference from the outputs before, as a share of their largest value.
        rtol: What it may be.
        before: Milliseconds of a call before: a median.
        after: The same now.
    """

    replaced: dict[str, list[str]]
    left: Counter[tuple[str, str]]
    whole: list[str]
    programs: int
    error: float
    rtol: float
    before: float
    after: float
    _undo: Callable[[], None]

    def undo(self) -> None:
        """Gives the old model back."""
        self._undo()

    def __str__(self) -> str:
        count = sum(map(len, self.replaced.values()))
        programs = several(self.programs, "program")
        lines = [f"{several(count, 'op')} replaced, in {programs}"]
        for kind, modules in sorted(self.replaced.items()):
            names = [name for name in dict.fromkeys(modules) if name]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            places = f" ({', '.join(names[:SHOWN])}{more})" if names else ""
            lines.append(f"  {kind} {len(modules)}{places}")
        lines.append(f"{several(self.left.total(), 'op')} in torch{':' * bool(self.left)}")
        lines += [f"  {op} {n}: {why}" for (op, why), n in self.left.most_common()]
        lines += [f"a graph in torch: {why}" for why in self.whole]
        lines.append(
            f"largest error {self.error:.1e} (bound {self.rtol:.0e}),"
            f" {self.before:.2f} ms before, {self.after:.2f} ms now"
        )
        return "\n".join(lines)


def inject(
    model: nn.Module,
    ops: Collection[str] | None = None,
    *,
    validate: Tensor | tuple[Any, ...],
    rtol: float | None = None,
) -> Injection:
    """Makes our kernels compute what they can of a model, in place, and compares the outputs.

    Args:
        model: In eval mode. It may be trained afterwards, too: ``model.train()``.
        ops: The kinds of ops to replace, as ``kinds`` names them; all if None.
        validate: What the model takes, for the comparison.
        rtol: How much outputs may differ, as a share of their largest value; 1e-3 if None, or 3e-2
            where they are of 16 bits.

    Raises:
        ArgumentError: If the model is none, or there is no such kind of op.
        ModelError: If the model is in training mode, or outputs differ by more; then it is as it
            was.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"inject: the model is a {type(model).__name__}; give a torch module, such as what"
            " timm.create_model makes"
        )
    if isinstance(ops, str):
        ops = (ops,)
    for each in ops or ():
        if each not in kinds():
            raise ArgumentError(f"inject: there is no op {each!r}{meant(each, kinds())}")
    if any(each.training for each in model.modules()):
        raise ModelError("inject compares outputs of inference; call model.eval() first")
    given = validate if isinstance(validate, tuple) else (validate,)
    wanted, before = _timed(model, given)
    if not wanted:
        raise ModelError("inject compares tensors of floats, and the model gives none")
    if rtol is None:
        rtol = 3e-2 if any(each.dtype.itemsize == 2 for each in wanted) else 1e-3
    told, old = Explanation(), model._compiled_call_impl

    def undo() -> None:
        model._compiled_call_impl = old

    def backend(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        return compiled(graph, example, told, run=True, only=ops)

    try:
        model._compiled_call_impl = torch.compile(_call(model), backend=backend)
        found, after = _timed(model, given)
        error = _error(found, wanted)
        if not error <= rtol:
            raise ModelError(
                f"inject: outputs differ by {error:.1e} of their largest value, more than rtol"
                f" {rtol:.0e}; the model is as it was"
            )
    except BaseException:
        undo()
        raise
    replaced: dict[str, list[str]] = {}
    for kind, module in told.ours:
        replaced.setdefault(kind, []).append(module)
    if not replaced:
        undo()
    left = Counter((each.op, each.why) for each in told.left)
    return Injection(
        replaced, left, [*told.whole], len(told.parts), error, rtol, before, after, undo
    )


def kinds() -> list[str]:
    """Names the kinds of ops that our kernels compute."""
    return sorted({kind_of(op) for op in (*aten.RULES, *gradients.KEPT)})


def _call(self: nn.Module) -> Callable[..., Any]:
    """Makes a function of a model's own call, which torch compiles for torch.nn's models, too.

    ``nn.Module.compile`` passes over those whose forward is torch's code, such as nn.Sequential.
    """

    def call(*given: Any, **named: Any) -> Any:
        return self._call_impl(*given, **named)

    return call


def _timed(model: nn.Module, given: tuple[Any, ...]) -> tuple[list[Tensor], float]:
    """Gives the floats among the outputs, and the milliseconds of a call."""
    times = []
    with torch.no_grad():
        found = tree_leaves(model(*given))
        for _ in range(CALLS):
            _wait()
            start = time.perf_counter()
            model(*given)
            _wait()
            times.append(1e3 * (time.perf_counter() - start))
    tensors = (each for each in found if isinstance(each, Tensor) and each.numel())
    floats = [each.clone() for each in tensors if each.is_floating_point()]
    return floats, statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Gives the largest difference as a share of the output's largest value; perhaps NaN."""
    errors = []
    for one, other in zip(found, wanted, strict=True):
        largest = other.double().abs().max()
        errors.append((one.double() - other.double()).abs().max() / largest.clamp(min=1e-30))
    return float(torch.stack([each.cpu() for each in errors]).max())


def main() -> int:
    """Shows it on models with random weights."""
    parser = Parser(prog="python -m maxvision.bridge.inject", description=main.__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", default=MODELS,
        help=f"as maxvision convert takes them; {', '.join(MODELS)} if none is named",
    )  # fmt: skip
    parser.add_argument("--ops", nargs="+", metavar="OP", help="kinds of ops; all if left out")
    parser.add_argument("--size", type=int, metavar="PX", help="edge of the pictures")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("maxvision").setLevel(logging.INFO)  # what is compiled
    passed = True
    for name in options.models:
        print(f"{name}:", flush=True)
        try:
            model = find(name, random=True, size=options.size)
            print(inject(model.module, options.ops, validate=tuple(model.example)))
        except ModelError as error:  # such as timm, which is not there
            complain(str(error))
            passed = False
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
