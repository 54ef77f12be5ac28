"""Take the documents' pictures: a run in a terminal and in its report, and the page of a study.

    python -m benchmarks.screenshots docs

It trains the demo in a pseudo-terminal, and a study of two systems with two seeds each: some minutes on 2 cores. `--rounds` and
`--seeds` make less of it. Pages are opened in Chromium by selenium (the extra `dev`; `chromium` and `chromedriver` on the PATH)
and kept as pictures of few colours. Figures differ from run to run in their times only.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import terminal

WIDTH, TALL = 1000, 1500  # pixels of a page, and how many of its height are shown if not all
NARROW = 390  # pixels of a telephone
COLOURS = 200  # of a picture
WAIT = 120  # seconds until a page is drawn, on a busy machine
STRATEGIES = "fedepth,depthfl"  # of the study
# Plotly has drawn every figure, and nothing waits to be drawn again.
DRAWN = """
const told = arguments[arguments.length - 1], MARKS = '.cartesianlayer :is(.trace, .hm)';
const ready = () => [...document.querySelectorAll('figure')].every((each) => each.querySelector(MARKS));
const look = () => ready() ? requestAnimationFrame(() => requestAnimationFrame(() => told(true))) : setTimeout(look, 20);
document.fonts.ready.then(look);
"""


def main() -> None:
    """Train, write the pages, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--rounds", type=int, default=20, help="of each run")
    parser.add_argument("--seeds", default="1,2", help="of the study, separated by commas")
    parser.add_argument(
        "--runs", type=Path, help="where runs are kept; a study there goes on, and takes up runs that are done"
    )
    asked = parser.parse_args()
    if missing := [name for name in ("chromium", "chromedriver") if not shutil.which(name)]:
        parser.error(f"{' and '.join(missing)} must be on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        take(asked.runs or Path(scratch) / "runs", asked.folder, Path(scratch), asked.rounds, asked.seeds)


def take(runs: Path, folder: Path, scratch: Path, rounds: int, seeds: str) -> None:
    """Write five pictures into a folder."""
    shutil.rmtree(runs / "demo", ignore_errors=True)  # the terminal's pictures are of the run in the report
    words = ["run", "--set", "run-name=demo", *(["--rounds", str(rounds)] if rounds != 20 else [])]
    command, written = f"piecework {' '.join(words)}", terminal.piecework(*words, "--output-dir", str(runs))
    written = written.replace(str(runs.resolve()).encode(), b"runs")
    terminal.draw(terminal.in_the_middle(command, written, rounds), folder / "terminal-round.svg")
    terminal.draw(terminal.at_the_end(command, written), folder / "terminal.svg")
    piecework("report", str(runs / "demo"))
    of = ["--strategies", STRATEGIES, "--seeds", seeds, "--rounds", str(rounds), "--study", "two-systems"]
    piecework("run", "--output-dir", str(runs), *of)
    report, study = runs / "demo" / "report.html", runs / "two-systems" / "compare.html"
    with_browser(
        scratch,
        (
            (report, WIDTH, TALL, "light", folder / "report.png"),
            (report, NARROW, TALL, "dark", folder / "report-telephone.png"),
            (study, WIDTH, None, "light", folder / "compare.png"),
        ),
    )


def piecework(*arguments: str) -> None:
    """Run a command, without what it prints unless it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "piecework", *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"piecework {' '.join(arguments)} failed:\n{done.stdout}")


def with_browser(scratch: Path, wanted: Sequence[tuple[Path, int, int | None, str, Path]]) -> None:
    """Open each page at a width in a mode, and keep its top, or all of it where no height is given."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={scratch}/user",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    browser.set_script_timeout(WAIT)
    try:
        for page, width, height, mode, path in wanted:
            media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            resize(browser, width, height or TALL)
            browser.get(page.resolve().as_uri())
            browser.execute_async_script(DRAWN)
            if height is None:  # how tall a page is depends on its figures, and these on its width
                resize(browser, width, browser.execute_script("return document.documentElement.scrollHeight"))
                browser.execute_async_script(DRAWN)
            keep(browser.get_screenshot_as_png(), path)
    finally:
        browser.quit()


def resize(browser: Any, width: int, height: int) -> None:
    """Give the window as many pixels inside."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def keep(png: bytes, path: Path) -> None:
    """Write a picture with few colours, which takes a third of the bytes."""
    from PIL import Image

    picture: Any = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
