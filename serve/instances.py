"""The processes that run a model, as one. Triton calls them its instances.

One interpreter takes pictures, has them decoded and reports for some 10,000 a second; a GPU that
decodes can do more. Nothing of MAX is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence

from maxvision.runtime.jpeg import Picture
from maxvision.serve.errors import not_ready
from maxvision.serve.remote import Remote, Result


class Instances:
    """Hands each image to the process for which the fewest of this sender are under way.

    Args:
        members: The processes.

    Attributes:
        members: See above.
        loaded: Whether there should be any.
    """

    def __init__(self, members: Sequence[Remote]) -> None:
        self.members: Sequence[Remote] = members
        self.loaded = True

    @property
    def up(self) -> int:
        """How many have run a picture."""
        return sum(each.ready for each in self.members)

    @property
    def ready(self) -> bool:
        """Whether one of them has run a picture."""
        return any(each.ready for each in self.members)

    @property
    def starts(self) -> int:
        """How often one was started."""
        return sum(each.starts for each in self.members)

    @property
    def batch_limit(self) -> int:
        """Images that run together at most, as they say."""
        return max(each.batch_limit for each in self.members)

    @property
    def busy(self) -> float:
        """Seconds that they did not wait for work, added up."""
        return sum(each.busy for each in self.members)

    @property
    def decoding(self) -> float:
        """Seconds that their decoders were at work, added up."""
        return sum(each.decoding for each in self.members)

    async def submit(self, id: str, image: Picture, features: bool = False) -> Result:
        """Lets the model look at an image; see ``Remote.submit``."""
        ready = [each for each in self.members if each.ready]
        if not ready:
            raise not_ready()
        one = min(ready, key=lambda each: each.waiting)
        return await one.submit(id, image, features)
