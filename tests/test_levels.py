"""Five levels compute the same: blocks and models, forward and backward, beside float64.

No result and no gradient of a block may be farther from float64 than twice the most that eager
torch is there. One function computes all blocks and models of a level, so that a compiler runs once
each way. Of level 5 the programs are interpreted; the kernels themselves run in the nightly test.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.levels import BLOCKS, LEVELS, eager, language, level
from examples.levels.graph import GraphNetwork, example
from examples.levels.language import (
    LanguageModel,
    Prompt,
    Step,
    greedy,
    on_arrays,
    sampled,
    write,
    write_cached,
)
from examples.levels.vision import VisionTransformer
from maxvision import torch_ops
from maxvision.bridge import convert, parts
from tests.graphs.interpret import Interpreted

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="LEVEL 4 IS NOT TESTED: it needs the package triton"
)
ALL = (*BLOCKS, "language", "vision", "graph")
FEW = 16 * torch.finfo(torch.float32).eps
"""Errors this small, of the largest number, are nobody's: erf and exp differ by some units."""


def n(*shape: int) -> Tensor:
    return torch.randn(*shape)


def scaled(*shape: int) -> Tensor:
    """Draws weights of which products keep their scale."""
    return torch.randn(*shape) / math.sqrt(math.prod(shape[1:]))


def transformer_weights(c: int, hidden: int) -> tuple[Tensor, ...]:
    return (
        n(c), n(c), scaled(3 * c, c), n(3 * c), scaled(c, c), n(c), n(c), n(c),
        scaled(hidden, c), n(hidden), scaled(c, hidden), n(c),
    )  # fmt: skip


def given() -> dict[str, tuple[Any, ...]]:
    """Draws what the blocks take: sizes beside those of tiles, and one beyond a tile of keys."""
    torch.manual_seed(0)
    long = (n(2, 2, 67, 8) for _ in range(3))
    return {
        "layer_norm": (n(2, 5, 12), n(12), n(12)),
        "mlp": (n(2, 5, 8), scaled(20, 8), n(20), scaled(8, 20), n(8)),
        "attention": (*long, True),
        "conv_norm_relu": (n(2, 4, 5, 6), scaled(6, 4, 3, 3), n(6), n(6)),
        "transformer": (n(2, 5, 8), *transformer_weights(8, 16), 2, False),
        "bottleneck": (
            n(2, 8, 5, 6), scaled(4, 8, 1, 1), n(4), n(4), scaled(4, 4, 3, 3), n(4), n(4),
            scaled(8, 4, 1, 1), n(8), n(8),
        ),
    }  # fmt: skip


def models(of: ModuleType) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Makes the models of a level's blocks, with the same weights and inputs for each level."""
    torch.manual_seed(1)
    return {
        "language": (LanguageModel(of, 11, 6, 8, 2, 1), (torch.randint(11, (2, 6)),)),
        "vision": (VisionTransformer(of, 3, 8, 4, 8, 2, 1), (n(2, 3, 8, 8),)),
        "graph": (GraphNetwork(of, 3, 4, 8, 1), (n(2, 5, 3), torch.randint(5, (2, 7, 2)))),
    }


def everything(
    blocks: ModuleType,
    dtype: torch.dtype = torch.float32,
    wrap: Callable[..., Any] = lambda f: f,
    ready: Callable[[nn.Module], nn.Module] = lambda model: model,
    only: Sequence[str] = ALL,
) -> dict[str, list[Tensor]]:
    """Computes all blocks and models of a level: the result of each, and its gradients.

    Args:
        blocks: The level.
        dtype: Of all floats.
        wrap: What to do with the function that computes all.
        ready: What to do with each model.
        only: These blocks and models.
    """

    def cast(x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_() if floats else x

    taken = {name: [*map(cast, args)] for name, args in given().items() if name in only}
    made = {
        name: (ready(model.to(dtype)), x)
        for name, (model, x) in models(blocks).items()
        if name in only
    }
    pictures = {name: [cast(x) for x in inputs] for name, (_, inputs) in made.items()}

    def whole(taken: dict[str, list[Any]], pictures: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        found = {name: getattr(blocks, name)(*args) for name, args in taken.items()}
        return found | {name: made[name][0](*x) for name, x in pictures.items()}

    results = wrap(whole)(taken, pictures)
    asked = {
        name: [x for x in (*args, *(made[name][0].parameters() if name in made else ()))
               if isinstance(x, Tensor) and x.requires_grad]
        for name, args in (taken | pictures).items()
    }  # fmt: skip
    slopes = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(ALL.index(name))).to(dtype)
        for name, y in results.items()
    ]
    tensors = [x for each in asked.values() for x in each]
    gradients = iter(torch.autograd.grad([*results.values()], tensors, slopes))
    return {name: [y.detach(), *(next(gradients) for _ in asked[name])]
            for name, y in results.items()}  # fmt: skip


@pytest.fixture(scope="module")
def exact() -> dict[str, list[Tensor]]:
    return everything(eager, torch.float64)


@pytest.fixture(scope="module")
def eagers() -> dict[str, list[Tensor]]:
    return everything(eager)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def off(found: Tensor, wanted: Tensor) -> float:
    """Gives the largest error as a part of the largest number."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def check(found: Any, exact: Any, eagers: Any) -> None:
    wrong = []
    for name, tensors in found.items():
        bound = 2 * max(map(off, eagers[name], exact[name])) + FEW
        for i, y in enumerate(tensors):
            error = off(y, exact[name][i])
            if not error <= bound:
                wrong.append(f"{name}, {f'gradient {i}' if i else 'result'}: {error} > {bound}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["script", pytest.param("triton_kernels", marks=needs_triton)])
def test_a_level_computes_what_eager_torch_does(name: str, exact: Any, eagers: Any) -> None:
    if name == "triton_kernels" and not torch.cuda.is_available() and not INTERPRETS:
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set; see tests/conftest.py")
    ready = torch.jit.script if name == "script" else lambda model: model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        check(everything(level(name), ready=ready), exact, eagers)


@pytest.mark.parametrize(
    "only",
    [
        ("mlp", "conv_norm_relu"),  # a C++ compiler takes a second or two for each kernel
        pytest.param(ALL, marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_inductor_computes_what_eager_torch_does(
    only: Sequence[str], exact: Any, eagers: Any
) -> None:
    """Level 3, as one function: compiled functions in it are compiled with it."""
    whole = partial(torch.compile, dynamic=False, fullgraph=True)
    with torch._inductor.config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        check(everything(level("compiled"), wrap=whole, only=only), exact, eagers)


def ours(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="maxvision", dynamic=False)


def test_our_ops_compute_what_eager_torch_does(
    exact: Any, eagers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 5: ops by name, and what torch.compile makes of the rest; no graph is left to torch."""
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    for each in torch_ops.TABLE.values():
        for held in ("made", "ready"):
            monkeypatch.setattr(each, held, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(everything(level("mojo"), ready=ours), exact, eagers)
    assert len(Interpreted.made) >= 2 * len(BLOCKS), "each block runs programs both ways"


@pytest.mark.nightly  # by day programs are interpreted, and other tests run the kernels
@pytest.mark.parametrize("name", ["eager", "mojo"])
def test_our_kernels_compute_what_eager_torch_does(name: str, exact: Any, eagers: Any) -> None:
    """As two programs, one each way, and as the functions of level 5."""
    if name == "eager":
        check(everything(eager, wrap=ours), exact, eagers)
    else:
        check(everything(level("mojo"), ready=ours), exact, eagers)


@pytest.mark.parametrize(
    ("block", "function"),
    [
        ("layer_norm", "layer_norm_in_steps"),
        ("mlp", "mlp_in_steps"),
        ("attention", "attention_in_steps"),
        ("attention", "attention_by_queries"),
    ],
)
@pytest.mark.parametrize("scripted", [False, True], ids=["eager", "script"])
def test_what_is_written_badly_computes_the_same(
    block: str, function: str, scripted: bool, exact: Any
) -> None:
    written = getattr(__import__(f"examples.levels.eager.{block}", fromlist=[function]), function)
    args = given()[block]
    found = (torch.jit.script(written) if scripted else written)(*args)
    assert off(found, exact[block][0]) < 1e-6


def test_a_level_has_a_file_for_each_block() -> None:
    for name in LEVELS:
        if name == "triton_kernels" and not find_spec("triton"):
            continue
        found = level(name)
        assert all(callable(getattr(found, block)) for block in BLOCKS)


# --- the language model writes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer() -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(eager, words=11, length=16, width=8, heads=2, layers=2).eval()


TEXTS = np.array([[1, 2, 3], [7, 0, 9]])


@pytest.mark.parametrize(
    "choose",
    [
        lambda: greedy,
        lambda: sampled(np.random.default_rng(0)),
        lambda: sampled(np.random.default_rng(0), top_k=3),
        lambda: sampled(np.random.default_rng(0), top_p=0.7),
    ],
    ids=["greedy", "sampled", "top-k", "top-p"],
)
def test_a_cache_changes_no_word(writer: LanguageModel, choose: Any) -> None:
    wanted = write(writer, TEXTS, 13, choose(), length=16)
    found = write_cached(
        on_arrays(Prompt(writer)), on_arrays(Step(writer)), TEXTS, 13, choose(), length=16
    )
    assert wanted.shape == (2, 16) and (found == wanted).all()


def test_a_text_has_an_end(writer: LanguageModel) -> None:
    with pytest.raises(ValueError, match="3 words and 14 more are beyond the longest text, 16"):
        write_cached(on_arrays(Prompt(writer)), on_arrays(Step(writer)), TEXTS, 14, greedy, 16)


def test_words_are_drawn_by_their_probabilities() -> None:
    shares = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(np.tile(shares, (20_000, 1)))[:, [2, 0, 3, 1]]  # in another order

    def drawn(**settings: Any) -> np.ndarray:
        found = sampled(np.random.default_rng(0), **settings)(logits)
        return np.bincount(found, minlength=4)[[1, 3, 0, 2]] / len(logits)

    np.testing.assert_allclose(drawn(), shares, atol=0.01)
    np.testing.assert_allclose(drawn(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.01)
    np.testing.assert_allclose(drawn(top_p=0.76), np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.01)
    np.testing.assert_allclose(drawn(top_p=0.01), [1, 0, 0, 0])
    np.testing.assert_allclose(drawn(top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0, 0], atol=0.01)


def test_converted_programs_write_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command line of language.py runs them; interpreted, and with few weights."""
    monkeypatch.setattr(convert, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    torch.manual_seed(4)
    small = LanguageModel(eager, len(language.LETTERS), language.LENGTH, 8, 2, 1).eval()
    monkeypatch.setattr(language, "trained", lambda: small)
    for name in ("prompt", "step"):
        made = convert.convert(*getattr(language, name)(), device="cpu", check_it=False)
        made.save(tmp_path / name)
    for options in [], ["--top-k", "3"], ["--top-p", "0.5", "--seed", "1"]:
        arguments = ["--text", "Shall I ", "--count", "6", *options]
        assert language.main(arguments) == 0
        wanted = capsys.readouterr().out
        assert language.main([str(tmp_path), *arguments]) == 0
        assert capsys.readouterr().out == wanted and wanted.startswith("Shall I ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--text", "Über"], "the model does not know ['Ü']"),
        (["no-such-folder"], "no-such-folder"),
        (["--count", "70"], "8 words and 70 more are beyond the longest text, 64"),
    ],
)
def test_who_asks_for_what_there_is_not_is_told(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    small = LanguageModel(eager, len(language.LETTERS), language.LENGTH, 8, 2, 1).eval()
    monkeypatch.setattr(language, "trained", lambda: small)
    with pytest.raises(SystemExit, match="2"):
        language.main(arguments)
    assert told in capsys.readouterr().err


def test_the_converted_graph_network_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    network, graphs = example()
    made = convert.convert(network, graphs, device="cpu", check_it=False)
    with torch.no_grad():
        torch.testing.assert_close(made(*graphs), network(*graphs), rtol=1e-5, atol=1e-6)


# --- the course -------------------------------------------------------------------------------


@needs_triton
def test_solutions_are_right() -> None:
    from torch.nn import functional as F

    from examples.levels import solutions

    torch.manual_seed(0)
    x = n(37, 70)
    assert torch.equal(solutions.transpose(x), x.T)
    torch.testing.assert_close(solutions.softmax(x), x.softmax(-1))
    assert solutions.softmax(torch.full((2, 5), -math.inf)).isnan().all()
    a, b, residual = n(70, 40), n(40, 67), n(70, 67)
    found = solutions.product_add_relu(a, b, residual)
    torch.testing.assert_close(found, (a @ b + residual).relu(), rtol=1e-5, atol=1e-5)

    gate, slope = n(37, 70), n(37, 70)
    ways = solutions.swish_multiply, lambda x, gate: F.silu(x) * gate
    made = []
    for way in ways:
        given = [each.clone().requires_grad_() for each in (x, gate)]
        y = way(*given)
        made.append([y, *torch.autograd.grad(y, given, slope)])
    torch.testing.assert_close(*made)


@needs_triton
def test_the_stages_of_a_ring() -> None:
    from examples.levels.solutions import stages

    machine = {"bytes_per_s": 4e12, "processors": 100, "shared_bytes": 228 * 1024}
    assert stages(128, 128, 64, 2, latency_s=1e-6, **machine) == 3  # 40 kB under way, 32 a stage
    assert stages(128, 128, 64, 2, latency_s=4e-6, **machine) == 6
    assert stages(128, 128, 64, 2, latency_s=9e-6, **machine) == 7, "no more fit"
    with pytest.raises(ValueError, match="two stages of 131072 bytes do not fit"):
        stages(256, 256, 64, 4, latency_s=1e-6, **machine)


ROOT = Path(__file__).resolve().parents[1]
COURSE = (ROOT / "docs/levels.md").read_text()


def snippets(*languages: str) -> list[tuple[str, str]]:
    """Gives the course's code, each with the prose before it."""
    found, end = [], 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```\n", COURSE, re.M | re.S):
        if match[1] in languages:
            found.append((match[2], COURSE[end : match.start()]))
        end = match.end()
    return found


def quoted(code: str) -> bool:
    return not code.startswith(("import", "from"))


@pytest.mark.parametrize(
    ("code", "before"), [each for each in snippets("python", "mojo") if quoted(each[0])]
)
def test_the_course_quotes_its_files(code: str, before: str) -> None:
    """A quote is of the file that the prose names last; lines that are left out are dots."""
    path = re.findall(r"`([\w./]+\.(?:py|mojo))`", before)[-1]
    text = textwrap.dedent((ROOT / path).read_text())
    lines = [line.strip() for line in text.splitlines()]
    at = 0
    for line in filter(None, map(str.strip, code.splitlines())):
        if line.strip("# ") != "...":
            assert line in lines[at:], f"{path} has no line {line!r} there"
            at = lines.index(line, at) + 1


@pytest.mark.parametrize("code", [code for code, _ in snippets("python") if not quoted(code)])
def test_the_courses_code_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On fewer numbers, and with less time for each."""
    from maxvision.bench import compare

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        compare.compare,
        "__kwdefaults__",
        {**compare.compare.__kwdefaults__, "seconds": 0.01, "roofline": False},
    )
    monkeypatch.setattr(torch, "compile", lambda function: function)
    exec(compile(code.replace("4096", "64"), "levels.md", "exec"), {"__name__": "shown"})
    assert "p50 ms" in capsys.readouterr().out


def test_every_chapter_has_an_exercise_and_its_solution() -> None:
    chapters = re.split(r"^## (?=\d)", COURSE, flags=re.M)[1:]
    assert [each[0] for each in chapters] == list("12345")
    for each in chapters:
        assert "**Exercise.**" in each and "`examples/levels/solutions.py`" in each
        name = re.search(r"Solution: `(\w+)`", each)
        assert name and f"def {name[1]}(" in (ROOT / "examples/levels/solutions.py").read_text()
