"""Serves a classifier over HTTP, on MAX Serve's worker process and queues.

    maxvision serve --model resnet-cifar10 --port 8000
    max serve --custom-architectures .:maxvision.serve --model MODEL

See docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Architectures(list[str]):
    """What ``max serve`` finds here: to walk over it is to serve.

    MAX knows language, embedding and generation models, and a closed set of tasks. It walks over
    this list once the package is imported and before it looks a model up, and from there on this
    package serves, with what the command line of ``max serve`` said.
    """

    def __iter__(self) -> Iterator[Any]:
        """Serves until the server is told to end, then leaves the program.

        Raises:
            SystemExit: With the exit code.
        """
        from maxvision.serve import server

        raise SystemExit(server.take_over())


ARCHITECTURES = Architectures(["maxvision"])
