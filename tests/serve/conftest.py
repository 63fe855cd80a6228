"""Servers that tests share: one with a key and tight limits, one that is as it comes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.started import ROOT, Server, answers_of, serving

EXAMPLES = sorted((ROOT / "examples").glob("*.jpg"))
KEY = "a-key"
QUEUE, IMAGES, BATCH, BODY, PIXELS = 12, 8, 4, 2_000_000, 1_500_000
MODEL = ["-m", "tests.serve.faulty", "--model", "resnet-cifar10", "--device", "cpu", "--port", "0"]


@pytest.fixture(scope="module")  # a test of test_server.py ends it
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The faulty model behind a key, with limits that a test can reach."""
    folder = tmp_path_factory.mktemp("serve")
    argv = [
        *MODEL, f"--max-queue-size={QUEUE}", f"--max-images-per-request={IMAGES}",
        f"--max-pixels={PIXELS}", f"--max-batch-size={BATCH}", "--max-batch-delay-ms=100",
        f"--max-body-bytes={BODY}", "--body-timeout=1",
    ]  # fmt: skip
    environ = {"MAXVISION_API_KEY": KEY, "FAULTY_LOG": str(folder / "batches")}
    with serving(argv, folder / "log", KEY, **environ) as started:
        started.batches = folder / "batches"  # type: ignore[attr-defined]
        yield started


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The faulty model without a key, for dialects, pages and attacks."""
    argv = [
        *MODEL, f"--max-images-per-request={IMAGES}", "--no-embeddings", "--body-timeout=2",
    ]  # fmt: skip
    with serving(argv, tmp_path_factory.mktemp("plain") / "log") as started:
        yield started


@pytest.fixture(scope="session")
def expected() -> list[dict]:
    """What run_graph.py says of the examples."""
    return answers_of(EXAMPLES)
