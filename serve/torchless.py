"""Keeps torch out of a server's processes, where it is installed but nothing asks for it.

MAX's pipelines import transformers, and that imports torch wherever it can: 2 to 8 s of a start,
and of the time for which a model's process that has died is missed. A process that multiprocessing
starts may import this module in the place of its parent's program.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def hide() -> None:
    """Lets imports from here on find no torch, unless there is one already."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def show() -> None:
    """Ends that, for what a program imports of its own."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]


_blocks: list[Any] = []
"""What the program was before the first block that runs, and one more for each of them."""


@contextmanager
def hidden_in_children() -> Iterator[None]:
    """Lets processes that multiprocessing spawns meanwhile begin with ``hide``.

    They do not import this program then; nothing that they are given may be defined in it. Several
    blocks may run at once.
    """
    program = sys.modules["__main__"]
    if not _blocks:
        _blocks.append(program.__spec__)
    _blocks.append(__spec__)
    program.__spec__ = __spec__
    try:
        yield
    finally:
        _blocks.pop()
        if len(_blocks) == 1:
            program.__spec__ = _blocks.pop()


if __name__ == "__mp_main__":
    hide()
