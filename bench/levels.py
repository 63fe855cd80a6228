"""``maxvision bench levels``: the blocks and models of examples/levels at each of their levels.

Each cell is a block or a model in one dtype. Level 1 is written well; where it is also written
badly, that is a row of its own. Results, and gradients with --backward, are compared with level 1
first. bench/compare.py says how times, launches and bytes come about. On a CPU Triton's kernels are
interpreted, so that level 4 has no time there. Lines of code are those that a level adds in Python:
of level 5 the torch formula of an op, not its Mojo kernel.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maxvision.bench import summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.compare import code_lines, compare
from maxvision.bench.compare import limits as ceilings
from maxvision.bench.engines import TORCH
from maxvision.bench.records import write
from maxvision.bridge.tensors import place_of
from maxvision.common.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]
BADLY = {
    "layer_norm": ("layer_norm_in_steps",),
    "mlp": ("mlp_in_steps",),
    "attention": ("attention_in_steps", "attention_by_queries"),
}
"""What is also written badly at level 1."""
MODELS = ("language", "vision", "graph")


def run(options: argparse.Namespace) -> int:
    """Measures every block, model and dtype that was asked for."""
    names, levels = _asked(options)
    device, facts = begin(options, __doc__)
    gpu = not device.is_host
    place = place_of(device)
    records: list[dict[str, Any]] = []
    _count_inductor()
    for dtype in dtypes(options, gpu):
        facts["ceilings"][dtype] = ceilings(dtype, gpu).record()
        for name in names:
            sys.stderr.write(f"{name}, {dtype}\n")
            torch._dynamo.reset()
            torch.manual_seed(0)
            given = _given(name, options.size or (16 if gpu else 1))
            args = [_placed(x, place, TORCH[dtype]) for x in given]
            ways = _ways(name, levels, place, TORCH[dtype])
            found = compare(
                {way: function for way, (function, _) in ways.items()}, args,
                backward=options.backward, seconds=options.seconds,
                untimed=[way for way in ways if "4" in way and not gpu],
            )  # fmt: skip
            for record in found.records:
                record |= {
                    "level": int(record["implementation"][0]), "block": name, "dtype": dtype,
                    "backward": options.backward, "lines": ways[record["implementation"]][1],
                }  # fmt: skip
            summaries.levels(found.records)
            records += found.records
            if options.json:
                write(options.json, facts, records)
    return 0 if all(each["passed"] for each in records) else FAILED


def _asked(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Gives the blocks and levels to measure.

    Raises:
        ArgumentError: If one is none, the examples are not there, or triton is asked for and not.
    """
    if not (ROOT / "examples/levels").is_dir():
        raise ArgumentError("bench levels measures examples/levels, which a checkout has; clone it")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from examples import levels

    known = [*levels.BLOCKS, *MODELS]
    for name in options.blocks or ():
        if name not in known:
            raise ArgumentError(f"--blocks must be of {', '.join(known)} but has {name!r}")
    numbers = options.levels or [1, 2, 3, 4, 5]
    if unknown := [each for each in numbers if each > 5]:
        raise ArgumentError(f"--levels must be of 1 to 5 but has {unknown[0]}")
    if 4 in numbers and not importlib.util.find_spec("triton"):
        if options.levels:
            raise ArgumentError("level 4 needs the package triton; run script/bootstrap triton")
        sys.stderr.write("level 4 is left out: it needs the package triton\n")
        numbers = [each for each in numbers if each != 4]
    return list(options.blocks or known), [levels.LEVELS[each - 1] for each in numbers]


def _ways(
    name: str, levels: Sequence[str], place: torch.device, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Any], int | None]]:
    """Gives the function of each level, and its lines of code, by what it is called."""
    from examples.levels import LEVELS, eager, level

    found: dict[str, tuple[Callable[..., Any], int | None]] = {}
    for each in ["eager", *(each for each in levels if each != "eager")]:
        called = f"{LEVELS.index(each) + 1} {each.removesuffix('_kernels')}"
        function = (
            _model(name, each, place, dtype) if name in MODELS else getattr(level(each), name)
        )
        plain = getattr(eager, name, function) if each == "script" else function
        found[called] = function, None if name in MODELS else code_lines(plain)
        for badly in BADLY.get(name, ()) if each == "eager" else ():
            module = importlib.import_module(f"examples.levels.eager.{name}")
            way = f"{called}: {badly.removeprefix(name).strip('_').replace('_', ' ')}"
            found[way] = getattr(module, badly), code_lines(getattr(module, badly))
    return found


def _model(name: str, of: str, place: torch.device, dtype: torch.dtype) -> nn.Module:
    """Makes a model of a level, with the same weights for all."""
    from examples.levels import eager, level
    from examples.levels.graph import GraphNetwork
    from examples.levels.language import LanguageModel
    from examples.levels.modules import at_level
    from examples.levels.vision import VisionTransformer

    blocks = eager if of in ("compiled", "mojo") else level(of)
    torch.manual_seed(1)
    made: nn.Module
    if name == "language":
        made = LanguageModel(blocks, 1000, 256, 256, 4, 4)
    elif name == "vision":
        made = VisionTransformer(blocks, 1000, 224, 16, 256, 4, 4)
    else:
        made = GraphNetwork(blocks, 32, 10, 128, 4)
    return at_level(made.to(place, dtype), of)


def _given(name: str, size: int) -> list[Any]:
    """Draws what a block or model takes; ``size`` is the factor of the batch."""
    n = torch.randn

    def scaled(*shape: int) -> Tensor:
        return n(*shape) / float(torch.tensor(shape[1:]).prod()) ** 0.5

    c, hidden = 384, 1536
    if name == "layer_norm":
        return [n(8 * size, 256, c), n(c), n(c)]
    if name == "mlp":
        return [n(2 * size, 256, c), scaled(hidden, c), n(hidden), scaled(c, hidden), n(c)]
    if name == "attention":
        return [*(n(2 * size, 6, 256, 64) for _ in range(3)), True]
    if name == "conv_norm_relu":
        return [n(2 * size, 64, 56, 56), scaled(64, 64, 3, 3), n(64), n(64)]
    if name == "transformer":
        return [
            n(2 * size, 256, c), n(c), n(c), scaled(3 * c, c), n(3 * c), scaled(c, c), n(c), n(c),
            n(c), scaled(hidden, c), n(hidden), scaled(c, hidden), n(c), 6, True,
        ]  # fmt: skip
    if name == "bottleneck":
        return [
            n(2 * size, 256, 28, 28), scaled(64, 256, 1, 1), n(64), n(64), scaled(64, 64, 3, 3),
            n(64), n(64), scaled(256, 64, 1, 1), n(256), n(256),
        ]  # fmt: skip
    if name == "language":
        return [torch.randint(1000, (2 * size, 256))]
    if name == "vision":
        return [n(2 * size, 3, 224, 224)]
    return [n(8 * size, 64, 32), torch.randint(64, (8 * size, 256, 2))]


def _placed(x: Any, place: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(place, dtype) if x.is_floating_point() else x.to(place)


def _count_inductor() -> None:
    """Lets Inductor count what its kernels move, for which it has to compile anew."""
    import logging

    from torch._inductor import compile_fx

    torch._inductor.config.force_disable_caches = True
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    compile_fx.inductor_metrics_log.propagate = False
