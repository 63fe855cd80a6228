"""Steps of optimizers: equal to torch's, in its state_dicts, compiled once."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxvision import torch_ops
from maxvision.bridge import optimizers
from maxvision.common.errors import ArgumentError

SHAPES = ((5,), (24, 33, 3, 3), (), (0, 3), (4096,), (4097, 3))
SGD: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"lr": torch.tensor(0.1), "momentum": 0.9, "dampening": 0.3, "maximize": True},
]
ADAM: list[dict[str, Any]] = [
    {"lr": 0.01, "betas": (0.0, 0.99)},
    {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True, "eps": 1e-3},
]
CASES = [
    *(("SGD", settings) for settings in SGD),
    *((name, settings) for name in ("Adam", "AdamW") for settings in ADAM),
]
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.nightly),
    pytest.param(torch.float64, marks=pytest.mark.nightly),
]


def drawn(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Draws parameters, one of them channels last, and one that begins at an odd address."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made.append(
        torch.randn(8, 6, 3, 3, generator=generator)
        .to(dtype).contiguous(memory_format=torch.channels_last)
    )  # fmt: skip
    made.append(torch.randn(300, generator=generator).to(dtype)[1:])
    return [x.detach().requires_grad_() for x in made]


def trained(of: type, dtype: torch.dtype, **settings: Any) -> list[Tensor]:
    """Takes steps in two groups; parameters, then their states; a parameter joins at the second."""
    params = [x.to(dtype).detach().requires_grad_() for x in drawn(torch.bfloat16)]
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    optimizer = of(groups, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        grads = drawn(torch.bfloat16, 1 + step)
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = None if i == 1 and step == 0 else g.detach().to(dtype).contiguous()
        optimizer.step()
        schedule.step()
    assert getattr(optimizer, "uses_maxvision", True)
    states = [optimizer.state[p] for p in params]
    return [*params, *(x for state in states for x in state.values() if isinstance(x, Tensor))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_torchs(dtype: torch.dtype) -> None:
    """Compiles one kernel."""
    for name, settings in CASES:
        ours, theirs = getattr(torch_ops, name), getattr(torch.optim, name)
        wanted = trained(theirs, torch.float64, **settings)
        torchs = trained(theirs, dtype, **settings)
        found = trained(ours, dtype, **settings)
        ulp = torch.finfo(dtype).eps
        for one, other, exact in zip(found, torchs, wanted, strict=True):
            assert one.dtype == other.dtype and one.shape == exact.shape
            if exact.numel():
                bound = 2 * (other - exact).abs().max() + 4 * ulp * exact.abs().max()
                assert (one - exact).abs().max() <= bound, (name, settings)


def test_nan_and_infinity_are_where_torch_has_them() -> None:
    for name, settings in CASES:
        both = []
        for of in (getattr(torch_ops, name), getattr(torch.optim, name)):
            p = torch.ones(9, requires_grad=True)
            optimizer = of([p], **settings)
            for _ in range(2):
                p.grad = torch.tensor([math.nan, math.inf, -math.inf, *[1.0] * 6])
                optimizer.step()
            both.append(p.detach())
        torch.testing.assert_close(*both, equal_nan=True)


def test_nothing_is_compiled_for_a_schedule_or_another_network() -> None:
    optimizers._kernel.cache_clear()
    net = nn.Linear(3, 4)
    for lr in (0.1, 0.2):
        optimizer = torch_ops.SGD(net.parameters(), lr)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    torch_ops.AdamW(nn.Linear(7, 2).parameters()).step()  # without gradients
    p = torch.ones(5, requires_grad=True)
    p.grad = torch.ones(5)
    torch_ops.AdamW([p]).step()
    assert optimizers._kernel.cache_info().misses == 1


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_state_goes_from_torch_to_us_and_back(name: str) -> None:
    settings = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {"amsgrad": True})}
    mixed, theirs = (nn.Linear(3, 4) for _ in range(2))
    mixed.load_state_dict(theirs.state_dict())
    wanted = getattr(torch.optim, name)(theirs.parameters(), **settings)
    ways: list[Any] = [torch_ops, torch.optim, torch_ops]
    kept: Any = None
    for step, way in enumerate(ways):
        optimizer = getattr(way, name)(mixed.parameters(), **settings)
        if kept is not None:
            optimizer.load_state_dict(kept)
        for net, each in ((mixed, optimizer), (theirs, wanted)):
            each.zero_grad()
            net(torch.full((2, 3), step + 1.0)).square().sum().backward()
            each.step()
        kept = copy.deepcopy(optimizer.state_dict())
        assert kept["param_groups"] == wanted.state_dict()["param_groups"]
    torch.testing.assert_close(mixed.state_dict(), theirs.state_dict())
    torch.testing.assert_close(kept["state"], wanted.state_dict()["state"])


def test_a_closure_is_called_with_gradients() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = torch_ops.SGD([p], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert p.tolist() == [0.0] * 3


def test_opcheck() -> None:
    params, grads = ([x.detach() for x in drawn(seed=seed)] for seed in (0, 1))
    states = [[torch.zeros_like(x) for x in params] for _ in range(3)]
    sgd = torch.tensor(torch_ops.sgd_settings(0.1, 0.9, first=True))
    adam = torch.tensor(torch_ops.adam_settings(1))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, given in (
        (torch_ops.sgd_, (params, grads, states[0], sgd)),
        (torch_ops.adam_, (params, grads, states[0], states[1], [], adam)),
    ):
        torch.library.opcheck(op, given, test_utils=utils)
    grads[6] = grads[6].contiguous()  # another order than that of the parameter
    torch.ops.maxvision.adam_(params, grads, *states, adam.expand(len(params), -1))


def test_what_torch_has_to_do_is_told_once() -> None:
    p = torch.ones(3, dtype=torch.float16, requires_grad=True)
    p.grad = torch.ones(3, dtype=torch.float16)
    optimizer = torch_ops.SGD([p], lr=0.5)
    why = "SGD is left to torch: a parameter is float16, and steps on a CPU are in float32, bfloat"
    with pytest.warns(UserWarning, match=why):
        optimizer.step()
    assert p.tolist() == [0.5] * 3 and not optimizer.uses_maxvision
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.warns(UserWarning, match="a gradient is sparse"):
        torch_ops.SGD(table.parameters(), lr=0.5).step()
    with pytest.warns(UserWarning, match="it is to be foreach"):
        torch_ops.AdamW([torch.ones(3, requires_grad=True)], foreach=True).step()


def test_mistakes_are_told_in_a_sentence() -> None:
    x, row = torch.ones(4, 3), torch.tensor(torch_ops.sgd_settings(0.1))
    wrong: list[tuple[Any, ...]] = [
        ([x], [], [], row, r"sgd_: there are 0 grads of 1 params"),
        ([x], [x], [x, x], row, r"there are 2 momenta of 1 params"),
        ([x], [x[0]], [], row, r"grads\[0\] is \[3\] but params\[0\] is \[4, 3\]"),
        ([x], [x.half()], [], row, r"grads\[0\] is float16 on cpu but params\[0\] is float32 on c"),
        ([x[:, :2]], [x[:, :2]], [], row, r"params\[0\] has holes in its memory"),
        ([x], [x], [x.clone().t().contiguous().t()], row, r"momenta\[0\] has strides \(1, 4\)"),
        ([x], [x], [], row[:3], r"settings is \[3\] but has to be \[1, 10\]"),
        ([x.half()], [x.half()], [], row, r"a parameter is float16, and steps on a CPU are in"),
        ([x.to("meta")], [x], [], row, r"tensors are on meta, and it computes on a CPU or a GPU"),
    ]
    for *given, why in wrong:
        lists = dict(zip(("params", "grads", "momenta"), given[:3], strict=True))
        with pytest.raises(ArgumentError, match=why):
            optimizers._step("sgd_", lists, given[3])
