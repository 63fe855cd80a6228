"""Which of a server's models are loaded: each has processes that are kept while it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from maxvision.serve.engine import WorkerEnded
from maxvision.serve.errors import Refusal
from maxvision.serve.supervisor import Supervisors

TICK = 0.05
"""Seconds between two looks at what is waited for."""


class Repository:
    """The models that a server was started with.

    Args:
        supervisors: What keeps the processes of each, by what clients call it.
        busy: Counts the images of a model that are under way.
        patience: Seconds that those may take to end when it is unloaded.
    """

    def __init__(
        self, supervisors: Mapping[str, Supervisors], busy: Callable[[str], int], patience: float
    ) -> None:
        self._supervisors = supervisors
        self._busy = busy
        self._patience = patience
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._locks = {name: asyncio.Lock() for name in supervisors}

    def start(self, failed: Callable[[asyncio.Task[None]], None]) -> None:
        """Begins to load all of them; what one of them ends with is told to ``failed``."""
        for name, supervisor in self._supervisors.items():
            self._tasks[name] = asyncio.ensure_future(supervisor.run())
            self._tasks[name].add_done_callback(failed)

    async def close(self) -> None:
        """Ends all processes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values())
        self._tasks.clear()  # with what their ends hold: semaphores, which would be told as leaked

    async def change(self, name: str, loaded: bool) -> None:
        """Loads a model, until it is ready; or unloads it, until its processes have ended.

        Raises:
            Refusal: 503, if its process ends before it is ready.
        """
        async with self._locks[name]:
            await (self._load(name) if loaded else self._unload(name))

    async def _load(self, name: str) -> None:
        supervisor = self._supervisors[name]
        if not supervisor.loaded:
            self._tasks[name] = asyncio.ensure_future(supervisor.run())
            supervisor.loaded = True
            supervisor.changed()
        task = self._tasks[name]
        while not supervisor.ready:
            await asyncio.wait({task}, timeout=TICK)
            if task.done():
                supervisor.loaded = False
                supervisor.changed()
                if isinstance(error := task.exception(), WorkerEnded):
                    raise Refusal(
                        503,
                        "model_not_loaded",
                        f"the model {name} cannot be loaded; the server's log says why",
                    ) from error
                task.result()

    async def _unload(self, name: str) -> None:
        """Lets the images that are under way end, as far as the patience goes."""
        supervisor = self._supervisors[name]
        if not supervisor.loaded:
            return
        supervisor.loaded = False
        supervisor.changed()
        clock = asyncio.get_running_loop().time
        end = clock() + self._patience
        while self._busy(name) and clock() < end:
            await asyncio.sleep(TICK)
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]})
