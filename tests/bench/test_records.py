"""Files of measurements: what they replace, and what they never do."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from maxvision.bench import records
from maxvision.common.errors import ArgumentError


def test_a_file_is_replaced_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    for count in (1, 2):
        records.write(tmp_path / "link.json", {"gpu": "none"}, [{"ms": i} for i in range(count)])
        found = json.loads((tmp_path / "real.json").read_text())
        assert found == {"environment": {"gpu": "none"}, "records": [{"ms": 0}, {"ms": 1}][:count]}
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_what_is_no_regular_file_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ArgumentError, match=f"{name}: this is not a regular file; choose"):
            records.write(tmp_path / name, {}, [])
        with pytest.raises(ArgumentError, match="this is not a regular file"):
            records.check_path(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(ArgumentError, match="this is a folder"):
        records.check_path(tmp_path)


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "replace", full)
    with pytest.raises(ArgumentError, match=r"^cannot write /.*/a\.json: the disk is full$"):
        records.write(tmp_path / "a.json", {}, [])
    assert not list(tmp_path.iterdir())
