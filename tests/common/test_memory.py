"""What a process may have of a CPU's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxvision.common import memory


def test_a_container_may_have_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER", limit)
    whole = memory.limit()
    assert whole > 1 << 30
    for text, wanted in (("max\n", whole), (f"{1 << 29}\n", 1 << 29), (f"{whole * 2}\n", whole)):
        limit.write_text(text)
        assert memory.limit() == wanted
