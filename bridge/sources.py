"""What can be converted: a torch module by its name, and how its pictures are prepared.

    timm/convnext_tiny      a model of timm, of torchvision (torchvision/vgg16), or either (vgg16)
    google/vit-base-...     an id on the Hugging Face hub, or a folder, for transformers
    transformers/vit        a kind of model of transformers, with random weights
    mypkg.models:make       a function of yours that gives a module
    model.pt2               what torch.export.save wrote

Each library is imported when one of its models is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxvision.bridge.exported import trace
from maxvision.bridge.importer import Traced
from maxvision.bridge.model import Model, pictures, pictures_of
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError, ModelError


class TorchModel(Model):
    """A torch module, and what is known of its inputs."""

    def trace(self) -> Traced:
        """Makes a program of it."""
        return trace(self.module, self.example, self.name, self.inputs)


def find(
    source: str, *, random: bool = False, size: int | None = None, seed: int = 0
) -> TorchModel:
    """Makes the module that a name stands for.

    Args:
        source: See above.
        random: Draw its weights instead of loading trained ones.
        size: Edge of the pictures, px; the model's own if None.
        seed: For weights that are drawn, and for the example.

    Raises:
        ModelError: If there is none, or its library is missing.
        ArgumentError: If the name is of no kind above.
    """
    torch.manual_seed(seed)
    path = Path(source).expanduser()
    if source.endswith(".pt2"):
        return _archive(path)
    if ":" in source and not path.exists():
        return _function(source, size)
    library, _, name = source.partition("/")
    if library == "timm":
        return _timm(name, random, size)
    if library == "torchvision":
        return _torchvision(name, random, size)
    if library == "transformers" and name:
        return _configured(name, size)
    if path.is_dir() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        return _transformers(source, random, size)
    if re.fullmatch(r"[\w.]+", source):
        if importlib.util.find_spec("timm") and _is_timm(source):
            return _timm(source, random, size)
        return _torchvision(source, random, size)
    raise ArgumentError(
        f"{source}: this is no model to convert; give timm/NAME, torchvision/NAME, a Hugging Face"
        " id or folder, module:function, a .onnx file or a .pt2 file"
    )


def _drawn(module: Any) -> Any:
    """Draws what a module begins with as zeros or ones: biases, norms and their statistics."""
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif name.endswith("running_mean"):
                tensor.normal_(0, 0.1)
            elif isinstance(tensor, torch.nn.Parameter):
                if tensor.ndim <= 1:
                    tensor.add_(0.1 * torch.randn_like(tensor))
                elif not tensor.any():
                    tensor.normal_(0, 0.02)
    return module


_TORCHVISION: list[torch.library.Library] = []
"""Holds the operators that `_declare_torchvision` declared: they go with the object."""


def _declare_torchvision() -> None:
    """Declares what torchvision expects of its compiled library when it is imported.

    One that was built for another torch cannot load that library. What is in it finds boxes, which
    no classifier does; timm and transformers import torchvision all the same.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.append(library)


def _import_torchvision() -> None:
    """Imports torchvision, if it is there, even one that was built for another torch."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _TORCHVISION:
            raise
        _declare_torchvision()
        importlib.import_module("torchvision")


def _library(name: str) -> Any:
    try:
        _import_torchvision()  # before transformers, which hides why it cannot
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be imported ({error}); {way_to('convert')}") from None


def _is_timm(name: str) -> bool:
    return bool(_library("timm").is_model(name.partition(".")[0]))


def _timm(name: str, random: bool, size: int | None) -> TorchModel:
    timm = _library("timm")
    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        import difflib

        close = difflib.get_close_matches(bare, timm.list_models(), n=1)
        hint = f"did you mean timm/{close[0]}?" if close else "maxvision convert --list-models"
        raise ModelError(f"timm/{name}: timm {timm.__version__} has no such model; {hint}")
    sized = {"img_size": size} if size else {}
    with _reading(f"timm/{name}"):
        try:
            module = timm.create_model(name, pretrained=not random, **sized)
        except TypeError:  # a network that takes any size
            module = timm.create_model(name, pretrained=not random)
    module = _drawn(module) if random else module
    config = timm.data.resolve_data_config({}, model=module)
    channels, height, width = config["input_size"]
    height, width = (size, size) if size else (height, width)
    described = pictures(
        (height, width),
        mean=config["mean"],
        std=config["std"],
        resize=round(min(height, width) / config["crop_pct"]),
        interpolation=config["interpolation"]
        if config["interpolation"] != "random"
        else "bilinear",
    )
    names = list(module.pretrained_cfg.get("label_names") or [])
    return TorchModel(
        name, module.eval(), _image(channels, height, width), ("x",), described, names
    )


def _torchvision(name: str, random: bool, size: int | None) -> TorchModel:
    models = _library("torchvision").models
    if name not in models.list_models():
        import difflib

        close = difflib.get_close_matches(name, models.list_models(), n=1)
        hint = (
            f"did you mean {close[0]}?" if close else "maxvision convert --list-models lists them"
        )
        raise ModelError(f"{name}: neither timm nor torchvision has such a model; {hint}")
    weights = models.get_model_weights(name).DEFAULT
    with _reading(name):
        module = models.get_model(name, weights=None if random else weights)
    module = _drawn(module) if random else module
    edge = size or 224
    described, labels = pictures((edge, edge), interpolation="bilinear"), []
    if weights is not None:
        prepare = weights.transforms()
        labels = list(weights.meta.get("categories", []))
        if hasattr(prepare, "crop_size"):
            edge = size or prepare.crop_size[0]
            described = pictures(
                (edge, edge),
                mean=prepare.mean,
                std=prepare.std,
                resize=prepare.resize_size[0],
                interpolation=prepare.interpolation.value,
            )
    return TorchModel(name, module.eval(), _image(3, edge, edge), ("x",), described, labels)


class _Logits(torch.nn.Module):
    """A transformers model that returns its logits, or its last hidden state, alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.model(*inputs, return_dict=True)
        return out.logits if "logits" in out else out.last_hidden_state


def _transformers(source: str, random: bool, size: int | None) -> TorchModel:
    transformers = _library("transformers")
    with _reading(source):
        config = transformers.AutoConfig.from_pretrained(source)
        kind = _auto_class(transformers, config)
        if random:
            model = _drawn(kind.from_config(config))
        else:
            model = kind.from_pretrained(source, dtype=torch.float32)
    name = os.path.basename(os.path.normpath(source))
    if kind is not transformers.AutoModelForImageClassification:
        tokens = torch.randint(0, config.vocab_size, (2, 128))
        return TorchModel(name, _Logits(model).eval(), (tokens,), (model.main_input_name,))
    processor = transformers.AutoImageProcessor.from_pretrained(source).to_dict()
    from maxvision.weights.metadata import size as size_of

    height, width = (size, size) if size else size_of(processor)
    channels = getattr(config, "num_channels", 3)
    labels = [config.id2label[i] for i in range(len(config.id2label))]
    return TorchModel(
        name, _Logits(model).eval(), _image(channels, height, width), ("x",), processor, labels
    )


def _configured(kind: str, size: int | None) -> TorchModel:
    """Makes a classifier of pictures as transformers configures it, with random weights.

    Stacks of equal layers have four.
    """
    transformers = _library("transformers")
    try:
        config = transformers.AutoConfig.for_model(kind)
        config.architectures = config.architectures or []
        if isinstance(getattr(config, "num_hidden_layers", None), int):
            config.num_hidden_layers = min(4, config.num_hidden_layers)
        module = transformers.AutoModelForImageClassification.from_config(config)
    except (ValueError, KeyError, ImportError) as error:  # the last: this kind needs a library
        raise ModelError(f"transformers/{kind}: {_one_line(error)}") from None
    if module.main_input_name == "input_ids":  # colours by their numbers in a palette
        tokens = torch.randint(0, config.vocab_size - 1, (2, config.max_position_embeddings))
        return TorchModel(kind, _Logits(_drawn(module)).eval(), (tokens,), ("input_ids",))
    edge: Any = size or getattr(config, "image_size", 224)
    height, width = (edge, edge) if isinstance(edge, int) else edge
    inputs = _image(getattr(config, "num_channels", 3), height, width)
    return TorchModel(kind, _Logits(_drawn(module)).eval(), inputs, ("x",), pictures_of(inputs))


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:200]


def _auto_class(transformers: Any, config: Any) -> Any:
    for name in (
        "AutoModelForImageClassification",
        "AutoModelForSequenceClassification",
        "AutoModelForCausalLM",
        "AutoModel",
    ):
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            architecture = (config.architectures or [""])[0]
            if name in ("AutoModelForImageClassification", "AutoModel") or "For" in architecture:
                return getattr(transformers, name)
    raise ModelError(f"{config.model_type}: transformers has no model class for it that runs here")


def _function(source: str, size: int | None) -> TorchModel:
    place, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with suppress(Exception):  # transformers hides why it cannot; the module may do without
        _import_torchvision()
    try:
        made = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{source}: {error}; give an importable module and its function") from None
    if not isinstance(made, torch.nn.Module):
        try:
            made = made()
        except Exception as error:
            raise ModelError(f"{source}: calling it without arguments failed ({error})") from error
    example: Any = None
    if isinstance(made, tuple):  # (module, example)
        made, example = made
    if not isinstance(made, torch.nn.Module):
        raise ModelError(
            f"{source}: expects a torch module, or a function that gives one (and example inputs)"
            f" but it gives a {type(made).__name__}"
        )
    if isinstance(example, Mapping):
        raise ModelError(f"{source}: expects example inputs as a tuple of tensors")
    edge = size or 224
    inputs = _image(3, edge, edge) if example is None else tuple(example)
    return TorchModel(name, made.eval(), inputs, (), pictures_of(inputs))


def _archive(path: Path) -> TorchModel:
    try:
        whole = torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"{path}: this is not what torch.export.save writes ({type(error).__name__})"
        ) from None
    if whole.example_inputs is None:
        raise ModelError(f"{path}: it holds no example inputs; save it with a newer torch")
    inputs = tuple(whole.example_inputs[0])
    return TorchModel(path.stem, whole.module(), inputs, (), pictures_of(inputs))


def _image(channels: int, height: int, width: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, channels, height, width, generator=generator),)


class _reading:
    """Tells in a sentence what a library could not find or download."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if error is None or isinstance(error, (ModelError, KeyboardInterrupt, TypeError)):
            return
        if isinstance(error, Exception):
            raise ModelError(
                f"{self.source}: its trained weights cannot be had ({_one_line(error)}); check the"
                " name and the network, or pass --random to convert it with random weights"
            ) from error
