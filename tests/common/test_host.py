"""What the machine lends this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxvision.common import host


def test_a_container_may_have_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "CONTAINER", limit)
    whole = host.memory()
    assert whole > 1 << 30
    for text, wanted in (("max\n", whole), (f"{1 << 29}\n", 1 << 29), (f"{whole * 2}\n", whole)):
        limit.write_text(text)
        assert host.memory() == wanted
