"""float64 on a CPU's kernels: torch's gradcheck of the ops, and modules that infer and train.

All programs of a test are compiled as one module; they are interpreted until then, as are those of
the gradchecks by day (test_torch_ops.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxvision import torch_ops
from maxvision.bridge import parts
from maxvision.bridge.dynamo import backend
from tests.bridge.test_torch_ops import ALL, CASES, passes_gradcheck
from tests.bridge.test_training import steps
from tests.bridge.together import Late, compile_together
from tests.graphs.interpret import Interpreted


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "Executor", Late)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    for each in torch_ops.TABLE.values():
        for held in ("made", "ready"):
            monkeypatch.setattr(each, held, {})
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def on_our_kernels(*runs: Callable[[], object]) -> None:
    """Calls functions twice: interpreted, which collects their programs, and compiled."""
    for run in runs:
        run()
    made = list(Interpreted.made)
    compile_together(made, "float64")
    for run in runs:
        run()
    assert made == Interpreted.made, "something was compiled anew"


class Small(nn.Module):
    """A convolution and a linear layer, and a constant that float32 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.register_buffer("third", torch.full((8,), 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.conv(x).relu(), 2).flatten(2).mT * self.third
        return F.log_softmax(self.linear(self.tokens(y).mean(1)), -1).square().sum()

    def tokens(self, y: Tensor) -> Tensor:
        return y


class Whole(Small):
    """Has norms, a depthwise convolution, attention and functions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(  # type: ignore[assignment]
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8),
        )  # fmt: skip
        self.norm = nn.LayerNorm(8)

    def tokens(self, y: Tensor) -> Tensor:
        y = self.norm(y * 0.1).unsqueeze(1)
        return F.scaled_dot_product_attention(y, F.gelu(y), y.tanh(), is_causal=True).squeeze(1)


def infers(model: nn.Module) -> Callable[[], None]:
    model = model.double().eval()
    fast = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)

    def run() -> None:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-13, atol=0)

    return run


def trains(model: nn.Module) -> Callable[[], None]:
    model = model.double()
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)

    def run() -> None:
        found, wanted = steps(model, fast, x), steps(twin, twin, x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    return run


@pytest.mark.parametrize("kind", [Small, pytest.param(Whole, marks=pytest.mark.nightly)])
def test_a_module_infers_and_trains(kind: type[Small]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend maxvision")
        on_our_kernels(infers(kind()), trains(kind()))


@pytest.mark.nightly
def test_every_op_passes_gradcheck() -> None:
    checks = []
    for name, case in ALL:
        given = CASES[name][case]()
        checks.append(partial(passes_gradcheck, name, given, check_undefined_grad=False))
    on_our_kernels(*checks)
