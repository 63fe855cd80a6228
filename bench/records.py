"""Files of measurements: an environment and a list of records, a line each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from maxvision.common.errors import ArgumentError


def write(path: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Writes what is known so far; whoever reads meanwhile gets a whole file."""
    lines = ",\n".join(json.dumps(record) for record in records)
    fresh = path.with_name(f"{path.name}.part")
    fresh.write_text(f'{{"environment": {json.dumps(facts)},\n"records": [\n{lines}\n]}}\n')
    os.replace(fresh, path)


def check_path(path: Path | None) -> None:
    """Finds out before anything is measured that a file could not be written after it.

    Raises:
        ArgumentError: If its folder is none.
    """
    if path and not path.absolute().parent.is_dir():
        raise ArgumentError(f"{path}: the folder {path.parent} does not exist; create it first")
