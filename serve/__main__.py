"""``python -m serve``: see ``maxvision.serve.options``."""

import sys
from collections.abc import Sequence

from maxvision.common.host import leave
from maxvision.serve.options import parse, parser

__all__ = ["main", "parser"]


def main(arguments: Sequence[str]) -> int:
    """Serves until it is told to end; returns the exit code."""
    options = parse(arguments)  # wrong arguments are told before anything heavy is imported
    from maxvision.serve.server import run

    return run(options)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
