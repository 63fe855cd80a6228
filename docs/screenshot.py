"""Draws docs/terminal.svg, the README's picture, from a real run: ``python docs/screenshot.py``."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
ARGUMENTS = ["examples/cat.jpg"]


def main() -> None:
    """Runs the bundled model twice (the first may compile) and draws the second run."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    for _ in range(2):
        shown = subprocess.run(
            [sys.executable, "run_graph.py", *ARGUMENTS, "--device", "cpu"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ script/run {' '.join(ARGUMENTS)}", style="bold"))
    console.print(Text.from_ansi(shown))
    drawn = console.export_svg(title="maxvision", theme=MONOKAI)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they are on the web
    drawn = "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"
    (ROOT / "docs/terminal.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
