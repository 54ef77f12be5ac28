"""Take the documents' pictures of a run: its report, a comparison, and what a terminal shows.

    python -m benchmarks.screenshots docs

It trains the demo and, for the comparison, another run of 20 rounds: a minute on 2 cores. Pages are opened in Chromium by
selenium (the extra `dev`; `chromium` and `chromedriver` on the PATH) and kept as pictures of few colours. The terminal's
picture is the command's own output, drawn by rich. Figures differ from run to run in their times only.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT

from piecework.commands.console import PlainConsole

LETTERS = 112  # columns of the terminal
WIDTH, TALL, WHOLE = 1000, 1500, 2900  # pixels of a page, and how many of its height are shown
NARROW = 390  # pixels of a telephone
COLOURS = 200  # of a picture
DEMO = ["--set", "run-name=demo"]
OTHER = ["--strategy", "depthfl", "--set", "run-name=depthfl"]  # with which the demo is compared


def main() -> None:
    """Train, write the pages, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument(
        "--runs", type=Path, help="where runs are written, and kept; those that are there are not repeated"
    )
    asked = parser.parse_args()
    if missing := [name for name in ("chromium", "chromedriver") if not shutil.which(name)]:
        parser.error(f"{' and '.join(missing)} must be on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        take(asked.runs or Path(scratch), asked.folder, Path(scratch))


def take(runs: Path, folder: Path, scratch: Path) -> None:
    """Write four pictures into a folder."""
    if not (runs / "demo").exists():
        said = piecework("run", "--output-dir", str(runs), *DEMO)
        terminal(said.replace(str(runs.resolve()), "runs"), folder / "terminal.svg")
    if not (runs / "depthfl").exists():
        piecework("run", "--output-dir", str(runs), *OTHER)
    piecework("report", str(runs / "demo"))
    piecework("compare", str(runs / "demo"), str(runs / "depthfl"), "--curves", str(scratch / "compare.html"))
    with_browser(
        scratch,
        (
            (runs / "demo" / "report.html", WIDTH, TALL, "light", folder / "report.png"),
            (runs / "demo" / "report.html", NARROW, TALL, "dark", folder / "report-telephone.png"),
            (scratch / "compare.html", WIDTH, WHOLE, "light", folder / "compare.png"),
        ),
    )


def piecework(*arguments: str) -> str:
    """Return what a command prints, lines while it runs included."""
    done = subprocess.run(
        [sys.executable, "-m", "piecework", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": str(LETTERS)},
        check=True,
    )
    return done.stdout


def terminal(said: str, path: Path) -> None:
    """Draw a command and what it printed, as rich draws a terminal."""
    console = PlainConsole(record=True, width=LETTERS, file=io.StringIO())
    console.print(f"$ piecework run\n{said.rstrip()}", highlight=False, soft_wrap=True)
    plain = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # whose fonts would be fetched
    drawn = console.export_svg(title="piecework run", unique_id="piecework", code_format=plain)
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")


def with_browser(scratch: Path, wanted: tuple[tuple[Path, int, int, str, Path], ...]) -> None:
    """Open each page at a width in a mode, and keep its top."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={scratch}/user",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        for page, width, height, mode, path in wanted:
            media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(page.resolve().as_uri())
            keep(browser.get_screenshot_as_png(), path)
    finally:
        browser.quit()


def keep(png: bytes, path: Path) -> None:
    """Write a picture with few colours, which takes a third of the bytes."""
    from PIL import Image

    picture: Any = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
