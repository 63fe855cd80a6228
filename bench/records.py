"""Files of measurements: an environment and a list of records, a line each."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from maxvision.common.errors import ArgumentError
from maxvision.common.folder import no_place
from maxvision.common.host import reason


def write(path: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Writes what is known so far; whoever reads meanwhile gets a whole file.

    Raises:
        ArgumentError: If it cannot be written.
    """
    check_path(path)
    lines = ",\n".join(json.dumps(record) for record in records)
    path = path.resolve()  # or a link would be replaced
    fresh = path.with_name(f"{path.name}.part")
    try:
        fresh.write_text(f'{{"environment": {json.dumps(facts)},\n"records": [\n{lines}\n]}}\n')
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise ArgumentError(f"cannot write {path}: {reason(error)}") from None


def check_path(path: Path | None) -> None:
    """Finds out before anything is measured that a file could not be written after it.

    Raises:
        ArgumentError: If its folder does not exist, or a device, a pipe or a folder has its name.
    """
    if path and (why := no_place(path)):
        raise ArgumentError(f"{path}: {why}; choose another place")
