"""What travels between the server and the model's process.

Arrays go as frames of their own, by MAX's queues: pixels are not copied in Python.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Job(msgspec.Struct):
    """One image for the model.

    Attributes:
        id: The request's, and the image's place in it.
        pixels: uint8 [H, W, C], as ``Preprocess`` gives them.
        sent: When, by the monotonic clock, which the processes of a machine share.
        features: Whether the pooled features are wanted too.
    """

    id: str
    pixels: np.ndarray
    sent: float
    features: bool = False


class Report(msgspec.Struct):
    """What the model's process has done; without ids only that it is alive.

    Attributes:
        pid: Its process.
        patience: Seconds that it may be silent, by the time of its largest batch.
        batch_limit: Images that it runs together at most, now.
        ids: The images of a batch that was run.
        logits: float32 [N, classes] of them.
        features: float32 [N, C] of them, if wanted.
        queue_ms: What each of them waited for the batch.
        inference_ms: What the batch took.
        failed: The images that the model failed on.
    """

    pid: int
    patience: float
    batch_limit: int
    ids: list[str] = []
    logits: np.ndarray | None = None
    features: np.ndarray | None = None
    queue_ms: list[float] = []
    inference_ms: float = 0.0
    failed: list[str] = []
