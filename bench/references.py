"""The networks that are measured, in transformers with random weights, and as our checkpoints.

Weights are drawn on the spot from a fixed seed: a figure needs no download, and a machine that
runs a graph compiled elsewhere makes the same weights itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.driver import Device
from max.dtype import DType

from maxvision import weights
from maxvision.bench.inputs import Images, Inputs, Tokens
from maxvision.bench.torchnet import TorchNet
from maxvision.common.errors import ArgumentError
from maxvision.graphs.program import Program, computing_in
from maxvision.graphs.quantize import CONFIG
from maxvision.runtime.classifier import Classifier, network, weights_of
from maxvision.runtime.executor import Executor, Lowering
from maxvision.runtime.preprocess import Preprocess
from maxvision.weights import Checkpoint
from maxvision.weights.catalog import PACKAGED
from maxvision.weights.checkpoint import converted_tensors
from maxvision.weights.family import find
from maxvision.weights.reference import references
from maxvision.weights.source import BUNDLED
from maxvision.weights.source import find as find_source

_WIDE = {"num_heads": [3, 12, 16], "embed_dim": [192, 768, 1024], "depth": [2, 2, 20]}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {  # He et al. 2015, table 1; Wu et al., table 2
    "resnet-18": ("ResNet", {"layer_type": "basic", "depths": [2, 2, 2, 2]}),
    "resnet-34": ("ResNet", {"layer_type": "basic", "depths": [3, 4, 6, 3]}),
    "resnet-50": ("ResNet", {}),
    "resnet-101": ("ResNet", {"depths": [3, 4, 23, 3]}),
    "resnet-152": ("ResNet", {"depths": [3, 8, 36, 3]}),
    "cvt-13": ("Cvt", {}),
    "cvt-21": ("Cvt", {"depth": [1, 4, 16]}),
    "cvt-w24": ("Cvt", _WIDE),
}


@references("bench")
def reference_model(name: str) -> Any:
    """Makes a network of ``NETWORKS`` with random weights, the same at every call.

    Any other ``name`` is a bundled model, one that a package brings, or a folder in Hugging Face
    format or of ``maxvision convert``, with its weights. What transformers has not runs by its
    program, as do models that ``maxvision quantize`` wrote.

    Raises:
        ArgumentError: If it is none of these.
        ModelError: If transformers cannot be imported.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if name in PACKAGED:
        return _torchnet(name)
    if name not in NETWORKS:
        folder = BUNDLED / name if name in weights.bundled() else Path(name)
        if not (folder / "config.json").is_file():
            raise ArgumentError(
                f"--models {name}: there is no such model; name {', '.join(NETWORKS)}, a bundled"
                " model, or a folder with a config.json"
            )
        if (folder / "program.json").is_file():  # maxvision convert wrote it
            return _torchnet(str(folder))
        config = json.loads((folder / "config.json").read_text())
        family = find(config.get("model_type", ""))
        if CONFIG in config or (family and not family.architectures):
            return _torchnet(str(folder))
        return transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    kind, options = NETWORKS[name]
    if options.get("layer_type") == "basic":
        options = {**options, "hidden_sizes": [64, 128, 256, 512]}
    config = getattr(transformers, f"{kind}Config")(**options, num_labels=1000)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    randomise(model)
    return model


def _torchnet(name: str) -> TorchNet:
    what = subject(name)
    made: TorchNet = TorchNet(what.program, what.tensors).eval()
    return made


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        program: What it computes: of one input, and one output.
        tensors: Its weights.
        inputs: Makes random inputs of a batch size, whose rings lie on a GPU or not.
        checkpoint: The model, if it classifies pictures.
    """

    program: Program
    tensors: Mapping[str, np.ndarray]
    inputs: Callable[[int, bool], Inputs]
    checkpoint: Checkpoint | None = None

    def computing_in(self, dtype: str) -> tuple[Program, Mapping[str, np.ndarray]]:
        """Gives the program that is compiled for a dtype, and its weights; pictures are levels."""
        model = self.checkpoint
        if model is None:
            return computing_in(self.program, dtype), self.tensors
        return network(model, model.size, dtype), weights_of(model)


def subject(name: str, reference: Any = None) -> Subject:
    """Describes ``reference_model(name)``; a converted model may take texts instead of pictures.

    Args:
        name: Of it.
        reference: Itself, where it is at hand.

    Raises:
        ArgumentError: If it takes something else.
    """
    folder = Path(name)
    if (folder / "program.json").is_file():
        found = find_source(folder)
        assert found.program is not None
        inputs = list(found.program.inputs.values())
        if not found.preprocess:
            if len(inputs) != 1 or len(inputs[0].shape) != 2 or "int" not in inputs[0].dtype:
                takes = ", ".join(map(str, inputs))
                raise ArgumentError(
                    f"--models {name}: it takes {takes}; bench models runs networks of pictures,"
                    " or of texts as int64[batch, tokens]"
                )
            program = found.program.keep([next(iter(found.program.outputs))])
            tensors = converted_tensors(found, program)
            return Subject(program, tensors, partial(Tokens.of, program))
    model = checkpoint(name, reference)
    prepare = Preprocess.from_config(model.preprocess)
    program = model.program(model.size).keep(["logits"])
    return Subject(program, model.tensors, partial(Images.of, prepare), model)


def randomise(model: torch.nn.Module) -> None:
    """Gives the norms other statistics and weights than a fresh model's, which hide mistakes."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_var is not None and module.running_mean is not None
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.normal_(module.running_mean, std=0.2)
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.LayerNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1)
            torch.nn.init.normal_(module.bias, std=0.2)


def checkpoint(name: str, reference: Any = None) -> Checkpoint:
    """Imports ``reference_model(name)``, made anew if need be, as a user's checkpoint would be."""
    if name not in NETWORKS:
        return weights.load(name)
    reference = reference or reference_model(name)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, name)
        reference.save_pretrained(folder)
        return weights.load(folder)


def our_executor(
    name: str,
    reference: Any,
    device: Device,
    dtype: DType,
    precompiled: Path | None = None,
    *,
    tf32: bool = True,
    sparse: str = "auto",
) -> Executor:
    """Makes what runs our model of the same weights, from ``precompiled`` if that is a folder.

    Raises:
        ArgumentError: If the folder has no such graph.
    """
    what = subject(name, reference)
    path = precompiled and find_artifact(precompiled, name, precision(dtype.name, tf32))
    if what.checkpoint:
        model = Classifier(what.checkpoint, device, dtype, tf32=tf32, sparse=sparse)
        if path:
            model.adopt(path)
        return model.executor()
    (program, tensors), lowering = what.computing_in(dtype.name), Lowering(dtype.name, tf32)
    if path:
        return Executor.adopt(path, program, tensors, device, lowering)
    return Executor.compile(program, tensors, device, lowering)


def find_artifact(folder: Path, name: str, dtype: str, option: str = "") -> Path:
    """Finds a compiled graph.

    ``option`` is ``layers`` for those of the layers, or the mode of ``--sparse``.

    Raises:
        ArgumentError: If the folder has none.
    """
    path = artifact(folder, name, dtype, option)
    if not path.is_file():
        how = {"": "", "auto": "", "layers": " --layers"}.get(option, f" --sparse {option}")
        raise ArgumentError(
            f"--precompiled {folder}: {path.name} is not there; make it with maxvision bench"
            f" compile{how}"
        )
    return path


def artifact(folder: Path, name: str, dtype: str, option: str = "") -> Path:
    """Names the file of a compiled graph; ``auto`` is what ``option`` is if left out."""
    suffix = "" if option in ("", "auto") else f"-{option}"
    return folder / f"{Path(name).name}-{dtype}{suffix}.mef"


def precision(dtype: str, tf32: bool) -> str:
    """Names what a graph computes in: float32 without TF32 is another than with it."""
    return "float32-exact" if dtype == "float32" and not tf32 else dtype
