"""A made-up third family of networks, installed as another package would be.

convnet_family.py is the whole of it. ``install`` writes that package and a model of it into a
folder; ``use`` lets this process see it, and ``environment`` another one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from maxvision.weights.family import GROUP, known

MODULE = Path(__file__).with_name("convnet_family.py")
ROOT = Path(__file__).resolve().parents[2]
SIDE = 32  # px
WIDTHS = (16, 32, 64)
LABELS = [f"thing {i}" for i in range(10)]
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


class Installed(NamedTuple):
    """Where things are.

    Attributes:
        site: Goes into PYTHONPATH.
        model: A folder with config.json, model.safetensors and preprocessor_config.json.
    """

    site: Path
    model: Path


class ConvNet(torch.nn.Module):
    """The same network in torch, of random weights and statistics."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        pairs = list(zip((3, *WIDTHS), WIDTHS, strict=False))
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(c, f, 3, padding=1) for c, f in pairs)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(f) for f in WIDTHS)
        self.fc = torch.nn.Linear(WIDTHS[-1], len(LABELS))
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.3, generator=generator)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.nn.functional.max_pool2d(norm(conv(x)).relu(), 2)
        return self.fc(x.mean((2, 3)))


def install(folder: Path, seed: int = 0) -> Installed:
    """Writes the package, with its entry point, and a model of it."""
    site, model = folder / "site", folder / "convnet"
    package(site, "convnet_family:FAMILY")
    shutil.copy(MODULE, site)
    model.mkdir(parents=True)
    save_file(ConvNet(seed).state_dict(), model / "model.safetensors")
    config = {
        "model_type": "convnet",
        "widths": list(WIDTHS),
        "num_channels": 3,
        "id2label": {str(i): label for i, label in enumerate(LABELS)},
    }
    preprocess = {
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text(json.dumps(preprocess))
    return Installed(site, model)


def package(site: Path, value: str, name: str = "convnet") -> None:
    """Writes what pip would leave of a package whose entry point is ``value``."""
    info = site / "convnet_family-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: convnet-family\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")


@contextmanager
def use(site: Path) -> Iterator[None]:
    """Lets this process see the package, for as long as the context lasts."""
    sys.path.insert(0, str(site))
    _forget()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        _forget()


def _forget() -> None:
    sys.modules.pop("convnet_family", None)
    invalidate_caches()
    known.cache_clear()


def environment(site: Path) -> dict[str, str]:
    """Makes the environment of another process that sees the package."""
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
