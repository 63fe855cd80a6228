"""A short soak; ``python -m tests.serve.soak`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("httpx")

from tests.serve import soak

SECONDS = 20.0
LEAST = 100  # requests in that time, on any machine


@pytest.mark.nightly
def test_good_ones_are_answered_among_bad_ones(tmp_path: Path) -> None:
    found = soak.soak(100_000, SECONDS, clients=8, seed=1, log=tmp_path / "log")
    assert not found.wrong, found
    assert sum(found.good.values()) > LEAST, found
    assert len(found.bad) > 5, found
    assert found.drift <= soak.DRIFT, found
