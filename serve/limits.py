"""How much may be under way at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve.errors import Refusal, overloaded


class Admission:
    """Counts what is under way, and refuses what would be too much, at once.

    Attributes:
        held: How much is under way.
        limit: How much may be.
    """

    def __init__(self, limit: int) -> None:
        self.held = 0
        self.limit = limit

    def check(self, amount: int = 1) -> None:
        """Raises what ``take`` would.

        Raises:
            Refusal: 429, if there is no room for ``amount``.
        """
        if self.held + amount > self.limit:
            raise overloaded()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Holds room for ``amount`` while the block runs.

        Raises:
            Refusal: 429, if there is none.
        """
        self.check(amount)
        self.held += amount
        try:
            yield
        finally:
            self.held -= amount


def too_many_images(count: int, limit: int) -> Refusal:
    """Says that a request holds more images than it may."""
    return Refusal(
        413,
        "too_many_images",
        f"at most {limit} images were expected but {count} came; send them in several requests",
    )
