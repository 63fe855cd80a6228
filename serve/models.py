"""The models of a server: found by name, and what they share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from maxvision.serve.access import AccessLog
from maxvision.serve.core import Card, Service, Shared
from maxvision.serve.errors import Refusal, not_ready
from maxvision.serve.images import Decoder
from maxvision.serve.instances import Instances
from maxvision.serve.limits import Admission, Board
from maxvision.serve.options import Options

T = TypeVar("T")

BODIES = 8
"""Largest bodies that may be held at once; smaller ones as many as are as large together."""


class Models(Shared):
    """The models of a server, the first of which is that of requests that name none.

    Attributes:
        options: What the server was told.
        bodies: Counts the bytes of requests that are held.
        access: The access log.
        created: When it began, in seconds since 1970.
        change: Loads a model (True) or unloads it (False), by its name, wherever its process is
            kept; None if nobody may ask for it.
    """

    def __init__(self, options: Options, board: Board | None = None) -> None:
        super().__init__(board or Board(models=len(options.models)))
        self.options = options
        bodies = max(BODIES * options.max_body_bytes, 2**28)
        self.bodies = Admission(bodies, self.board, Board.BYTES)
        self.access = AccessLog(options.access_log)
        self.created = int(time.time())
        self.change: Callable[[str, bool], Awaitable[None]] | None = None
        self._all: dict[str, Service] = {}

    def add(
        self, card: Card, options: Options, instances: Instances, decoder: Decoder, queue: int
    ) -> Service:
        """Adds a model; see ``Service``."""
        made = self._all[card.name] = Service(card, options, instances, decoder, queue, self)
        return made

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Service]:
        return iter(self._all.values())

    def __contains__(self, name: str) -> bool:
        return name in self._all

    @property
    def first(self) -> Service:
        """The model of requests that name none."""
        return next(iter(self))

    @property
    def names(self) -> str:
        """What clients call the models, in a sentence."""
        *most, last = self._all
        return f"{', '.join(most)} and {last}" if most else last

    def find(self, name: str | None = None) -> Service:
        """Finds a model by its name, or the first one for None.

        Raises:
            Refusal: 404, if there is no such model.
        """
        if name is None:
            return self.first
        if (found := self._all.get(name)) is None:
            served = f"{self.names} {'are' if len(self) > 1 else 'is'} served"
            raise Refusal(404, "model_not_found", f"there is no model {name[:80]!r}; {served}")
        return found

    @property
    def ready(self) -> bool:
        """Whether a picture would be classified now, by each model that is loaded."""
        loaded = [model for model in self if model.loaded]
        return bool(loaded) and all(model.ready for model in loaded)

    def check_ready(self, retry_after: float = 5) -> None:
        """Refuses while a picture would not be classified, for some seconds.

        Raises:
            Refusal: 503.
        """
        if not self.ready:
            raise not_ready(retry_after)

    def check_room(self) -> None:
        """Refuses before a body is read that would be refused whichever model it names.

        Raises:
            Refusal: 503 or 429, if no model would take an image now: what the first says.
        """
        refused: Refusal | None = None
        for model in self:
            try:
                return model.check_room()
            except Refusal as refusal:
                refused = refused or refusal
        if refused:
            raise refused

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function on a decoding thread, so that it does not hold up other requests."""
        return await self.first.in_thread(function, *args)

    def close(self) -> None:
        """Lets the threads end: those that decode, and that of the access log."""
        for model in self:
            model.close()
        self.access.close()
