"""Sequences, graphs and maps instead of classified pictures: several inputs, integers, masks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import maxvision
from maxvision.bench.tasks import Messages
from maxvision.bridge.exported import trace
from maxvision.bridge.importer import Traced
from maxvision.common.errors import ModelError
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.program import Program, computing_in
from tests.graphs.interpret import interpret

ROOT = Path(__file__).resolve().parents[2]
TRACED, RUN, TOKENS, WORDS = 2, 3, 10, 40

BERT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "vocab_size": WORDS, "max_position_embeddings": 24,
}  # fmt: skip
GPT = {
    "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "n_positions": 24,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS}


class Pyramid(nn.Module):
    """Maps of three sizes, each with what the smaller ones saw (Lin et al. 2017), and labels of
    pixels by dilated convolutions and a pool (Chen et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 8, 3, 2, 1) for c in (3, 8, 8))
        self.side = nn.ModuleList(nn.Conv2d(8, 6, 1) for _ in range(3))
        self.wide = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.labels = nn.Conv2d(20, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size, levels, found = x.shape[-2:], [], {}
        for conv in self.down:
            x = conv(x).relu()
            levels.append(x)
        pooled = F.interpolate(x.mean((2, 3), keepdim=True), x.shape[-2:], mode="bilinear")
        maps = self.labels(torch.cat([*(conv(x) for conv in self.wide), pooled], 1))
        found["out"] = F.interpolate(maps, size, mode="bilinear", align_corners=False)
        above = None
        for level, side in reversed([*zip(levels, self.side, strict=True)]):
            y = side(level)
            above = y if above is None else y + F.interpolate(above, y.shape[-2:])
            found[f"level {above.shape[-1]}"] = above
        return found


def ids(batch: int) -> Tensor:
    return torch.randint(2, WORDS, (batch, TOKENS))


def hides(*hidden: int) -> Tensor:
    """Makes masks that hide the first tokens of a text, or the last ones."""
    mask = torch.ones(len(hidden), TOKENS, dtype=torch.int64)
    for row, count in zip(mask, hidden, strict=True):
        row[slice(count) if count > 0 else slice(count or TOKENS, None)] = 0
    return mask


def padded(batch: int) -> tuple[Tensor, Tensor]:
    return ids(batch), hides(*(-3, 0, -1)[:batch])


def led(batch: int) -> tuple[Tensor, Tensor]:
    return ids(batch), hides(*(4, 0, 1)[:batch])


def graphs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, WORDS, (batch, 7)), torch.randint(0, 7, (batch, 12, 2))


class Masked(nn.Module):
    """A model of transformers whose second input is a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask)


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Callable[[int], Any], dict[str, int], set[str]]] = {
    "BERT": (
        lambda: transformers.BertModel(transformers.BertConfig(**BERT)), lambda n: (ids(n),),
        {"attention": 2, "attention_bias": 0}, {"last_hidden_state", "pooler_output"},
    ),
    "BERT, texts that end early": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)), padded,
        {"attention": 2, "attention_bias": 1}, {"logits"},
    ),
    "RoBERTa": (
        lambda: transformers.RobertaModel(transformers.RobertaConfig(**BERT)), padded,
        {"attention": 2, "attention_bias": 1}, {"last_hidden_state", "pooler_output"},
    ),
    "GPT-2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)), lambda n: (ids(n),),
        {"attention": 2, "attention_bias": 0}, {"logits"},
    ),
    "GPT-2, texts that begin late": (
        lambda: Masked(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))), led,
        {"attention": 2, "attention_bias": 1}, {"logits"},
    ),
    "T5's encoder": (
        lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)), padded,
        {"attention": 2, "attention_bias": 1, "rms_norm": 5}, {"last_hidden_state"},
    ),
    "graphs": (
        lambda: Messages(WORDS, 16, rounds=2, classes=3), graphs,
        {"scatter_add": 2, "gather": 5}, {"logits"},
    ),
    "maps": (
        Pyramid, lambda n: (torch.randn(n, 3, 32, 24),), {"conv2d": 10},
        {"out", "level 3", "level 6", "level 12"},
    ),
}  # fmt: skip
"""A module, its inputs, how often some ops come after the passes, and its outputs."""


def made(name: str) -> tuple[nn.Module, Callable[[int], Any]]:
    torch.manual_seed(0)
    make, draw, *_ = MODELS[name]
    return make().eval(), draw


@cache
def traced(name: str) -> Traced:
    module, draw = made(name)
    return trace(module, draw(TRACED))


@pytest.mark.parametrize("name", MODELS)
def test_it_means_the_same(name: str) -> None:
    module, draw = made(name)
    *_, counts, names = MODELS[name]
    found = traced(name)
    assert found.program is not None, found.missing
    program = Program.from_json(found.program.to_json())
    assert set(found.outputs) == names
    final = passes.run(program, Backend("cpu", "float32"))
    met = Counter(node.op for node in final.nodes if not node.at_load)
    assert {op: met[op] for op in counts} == counts
    given = draw(RUN)
    with torch.no_grad():
        wanted = module.double()(*(x.double() if x.is_floating_point() else x for x in given))
    wanted = {"logits": wanted} if isinstance(wanted, Tensor) else dict(wanted)
    for run in (program, final):
        values = interpret(run, [x.numpy() for x in given], found.tensors)
        for output in names:
            want = wanted[output].numpy()
            largest = float(np.abs(want).max())
            np.testing.assert_allclose(values[output], want, 1e-5, 1e-5 * largest, err_msg=output)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_in_bfloat16(name: str) -> None:
    """What is made of no input, such as zeros to add to, takes the dtype of what it meets."""
    module, draw = made(name)
    found = traced(name)
    assert found.program is not None
    final = passes.run(computing_in(found.program, "bfloat16"), Backend("cpu", "bfloat16"))
    given = draw(RUN)
    with torch.no_grad():
        wanted = module(*given)
    wanted = {"logits": wanted} if isinstance(wanted, Tensor) else dict(wanted)
    values = interpret(final, [x.numpy() for x in given], found.tensors)
    for output in found.outputs:
        want = wanted[output]
        assert final.types[final.outputs[output]].dtype == "bfloat16"
        error = np.abs(values[output] - want.numpy()).max() / want.abs().max()
        assert error < 0.05, output


class Text(nn.Module):
    """A text and its mask in, two outputs out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(**{**GPT, "n_layer": 1})  # a compilation takes its ops
        self.text = Masked(transformers.GPT2LMHeadModel(config))

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        logits = self.text(ids, mask).logits
        return logits, logits.mean(1)


class Graphs(nn.Module):
    """A graph of nodes and edges in, two outputs out, the second of which mixes graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, _ = made("graphs")

    def forward(self, kinds: Tensor, edges: Tensor) -> Any:
        found = self.messages(kinds, edges)
        return found, found.repeat(3, 1).view(found.shape[0], -1)


@pytest.mark.nightly  # by day test_convert does so with one input, test_lower runs these ops
@pytest.mark.parametrize(("make", "draw"), [(Text, led), (Graphs, graphs)])
def test_it_runs_and_its_folder_runs_without_torch(
    tmp_path: Path, make: Callable[[], nn.Module], draw: Callable[[int], Any]
) -> None:
    """Compiles one graph."""
    module = make().eval()
    fast = maxvision.convert(module, draw(2), device="cpu", check_it=False)
    given = draw(3)
    with torch.no_grad():
        wanted = module(*given)
    found = fast(given[0].int(), *given[1:])  # ids of 32 bits are ids
    for one, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    fast.save(tmp_path / "all")
    np.savez(tmp_path / "given.npz", *(x.numpy() for x in given))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import maxvision, numpy as np\n"
        f"fast = maxvision.Converted.load({str(tmp_path / 'all')!r}, device='cpu')\n"
        f"given = np.load({str(tmp_path / 'given.npz')!r})\n"
        f"np.savez({str(tmp_path / 'made.npz')!r}, *fast(*given.values()))\n"
        f"fast.save({str(tmp_path / 'again')!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for one, again in zip(found, np.load(tmp_path / "made.npz").values(), strict=True):
        np.testing.assert_array_equal(one.numpy(), again)
    for name in ("config.json", "program.json", "model.safetensors"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_only_what_was_converted_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"maxvision convert did not write this; .*maxvision.load"):
        maxvision.Converted.load("resnet-cifar10")
