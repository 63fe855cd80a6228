"""What is read off the nodes of an exported graph: types, and where they come from."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.fx import Node

from maxvision.common.errors import ModelError
from maxvision.graphs.types import BATCH, Size, Type, multiple


def origin(node: Node) -> str:
    """Says which line of which module a node is from: ``layers.0.attn (swin.py:359)``."""
    path = module_of(node)
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    where = f"{lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]}" if lines else ""
    return f"{path} ({where})" if path and where else path or where


def module_of(node: Node) -> str:
    """Names the module that a node is from."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("L['self']").removeprefix(".")  # TorchDynamo's name of the model


def size_of(value: Any) -> Size:
    """Writes a size down; a named one is a multiple of the batch.

    Raises:
        ModelError: If it is something else.
    """
    if isinstance(value, int):
        return value
    expression = value.node.expr
    if expression.is_number:
        return int(expression)
    (symbol,) = expression.free_symbols or (None,)
    number = expression.coeff(symbol)
    if expression != number * symbol or not number.is_integer:
        raise ModelError(
            f"a size of {expression} is not a multiple of the batch; only the batch can vary"
        )
    return multiple(int(number), BATCH)


def type_of(value: Tensor) -> Type:
    """Gives the type of a tensor; a dynamic batch by its name."""
    return Type(
        tuple(size_of(size) for size in value.shape), str(value.dtype).removeprefix("torch.")
    )
