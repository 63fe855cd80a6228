"""``python -m serve``: see ``serve.options``."""

import sys

from graphs.host import leave
from serve.options import parse

if __name__ == "__main__":
    options = parse(sys.argv[1:])  # wrong arguments are told before anything heavy is imported
    from serve.server import run

    leave(run(options))
