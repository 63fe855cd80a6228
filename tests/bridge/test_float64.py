"""float64 on a CPU's kernels: torch's gradcheck of the ops, and modules that infer and train.

All programs of a test are compiled as one module; they are interpreted until then.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence

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

BY_DAY = [("linear", 0), ("conv_bn_relu", 1), ("attention", 1), ("max_pool2d", 0), ("mse", 0)]
"""What has each kernel that sums, but the nightly rest of shapes and expressions."""


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "Executor", Late)
    monkeypatch.setattr(Interpreted, "made", [])
    for each in torch_ops.TABLE.values():
        monkeypatch.setattr(each, "made", {})
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


def gradchecks(cases: Sequence[tuple[str, int]]) -> list[Callable[[], object]]:
    def check(name: str, case: int) -> Callable[[], object]:
        given = CASES[name][case]()
        return lambda: passes_gradcheck(name, given, check_undefined_grad=False)

    return [check(*each) for each in cases]


class Small(nn.Module):
    """Has a layer of each kind; constants that float32 does not hold are among its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.tokens, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("third", torch.full((8,), 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        y = (self.depthwise(y) * 0.1).flatten(2).mT * self.third
        y = self.tokens(y).unsqueeze(1)
        y = F.scaled_dot_product_attention(y, F.gelu(y), y.tanh())
        return F.log_softmax(self.linear(y.mean((1, 2))), -1).square().sum()


def infers() -> Callable[[], None]:
    model = Small().double().eval()
    fast = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)

    def run() -> None:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-13, atol=0)

    return run


def trains() -> Callable[[], None]:
    model = Small().double()
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)

    def run() -> None:
        found, wanted = steps(model, fast, x), steps(twin, twin, x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    return run


def test_it_infers_trains_and_passes_gradcheck() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend maxvision")
        on_our_kernels(infers(), trains(), *gradchecks(BY_DAY))


@pytest.mark.nightly
def test_every_op_passes_gradcheck() -> None:
    on_our_kernels(*gradchecks(ALL))
