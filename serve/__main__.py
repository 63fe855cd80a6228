"""``python -m serve``: see ``maxvision.serve.options``."""

import sys
from collections.abc import Sequence

from maxvision.common.console import exit_code, run_program
from maxvision.serve.options import parse, parser

__all__ = ["main", "parser"]


def main(arguments: Sequence[str]) -> int:
    """Serves until it is told to end; returns the exit code."""
    options = parse(arguments)  # wrong arguments are told before anything heavy is imported

    def serve() -> int:
        from maxvision.serve.server import run

        return run(options)

    return exit_code(serve, options, "maxvision serve", "serve", internal=1)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
