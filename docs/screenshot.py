"""Draws the README's pictures from real runs: ``python docs/screenshot.py``.

docs/terminal.svg is what run_graph.py prints, docs/page.jpg what the server's page shows in
Chromium, which has to be installed with its driver.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' server and browser
COLUMNS = 100
ARGUMENTS = ["examples/cat.jpg"]
PICTURES = ["coffee", "rocket", "cat"]


def terminal() -> None:
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


def page() -> None:
    """Starts a server, lets a browser send it pictures, and photographs the answers."""
    from PIL import Image

    from tests.serve.browser import browsing, until
    from tests.serve.started import serving

    argv = ["-m", "maxvision.serve", "--model", "resnet-cifar10", "--device", "cpu", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(argv, Path(folder, "log")) as server,
        browsing(1000, 900) as window,
    ):
        for _ in range(2):  # the first pictures find a cold server
            window.get(server.url)
            files = [str(ROOT / "examples" / f"{name}.jpg") for name in PICTURES]
            window.find_element("id", "files").send_keys("\n".join(files))
            status = window.find_element("id", "status")
            until(window, lambda: status.text == f"{len(files)} pictures answered.")  # noqa: B023
        last = window.find_elements("css selector", "#pictures > li")[-1]
        height = last.location["y"] + last.size["height"] + 16
        shown = window.get_screenshot_as_png()
    picture = Image.open(io.BytesIO(shown)).convert("RGB")
    picture.crop((0, 0, picture.width, height)).save(ROOT / "docs/page.jpg", quality=85)


def main() -> None:
    """Draws both."""
    terminal()
    page()


if __name__ == "__main__":
    main()
