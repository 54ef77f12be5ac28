"""The pages of runs in a real browser, at two widths, light and dark; and nothing of them overflows, fails or stays white."""

import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import BEYOND
from report_helpers import client, make_run, refused, round_record

from piecework.report.compare import group_runs
from piecework.report.compare_view import curves_html, write_curves
from piecework.report.page import Section, table
from piecework.report.run_page import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, of the extra dev, is not installed")
waiting = pytest.importorskip("selenium.webdriver.support.wait", reason="selenium, of the extra dev, is not installed")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")
OFFLINE = ("quic", "gpu", "background-networking", "component-update", "sync", "dev-shm-usage")
LONG = "a-run-whose-name-has-no-blank-and-is-long-" * 4
# Texts of one drawing that lie over each other; of oblique ones the box says nothing.
OVERLAPS = """
const oblique = (each) => (each.getAttribute('transform')?.match(/rotate\\(([-.0-9]+)/)?.[1] ?? 0) % 90 !== 0;
const found = [];
for (const drawing of document.querySelectorAll('svg.grid, .js-plotly-plot')) {
  const shown = (each) => each.textContent && each.checkVisibility() && !oblique(each);
  const texts = [...drawing.querySelectorAll('text')].filter(shown);
  const boxes = texts.map((each) => [each.textContent, each.getBoundingClientRect()]);
  for (const [at, [one, a]] of boxes.entries()) for (const [other, b] of boxes.slice(at + 1))
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
      found.push(`${one} / ${other}`);
}
return found;
"""
# The colour of each figure in a cell, of the cell's shade, how much of it is seen, and of what is behind.
CELLS = """
return [...document.querySelectorAll('svg.grid g')].filter((each) => each.querySelector('text')).map((each) => {
  const [behind, shade, text] = ['.empty', '.full', 'text'].map((kind) => getComputedStyle(each.querySelector(kind)));
  return [text.fill, shade.fill, Number(shade.fillOpacity), behind.fill];
});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--no-first-run",
        profile,
        *(f"--disable-{name}" for name in OFFLINE),
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of page, of runs with long names, reasons and device classes, and many parts."""
    folder = tmp_path_factory.mktemp("runs")
    names = [f"layer{n}.block" for n in range(20)]
    trained = [{"part": name, "distilled": False} for name in names]
    few = {"aggregated": True, "examples": 30, "trained": trained[:6]}
    own = {"trained": names, "pieces": [[*range(12)], [*range(12, 20)]], "examples": 5, "device": "board-" + "x" * 60}
    some = {"aggregated": True, "examples": 30, "trained": trained}
    rounds = [round_record(n, n / 10, [client(0, **own), refused(1, "y" * 300)], **some) for n in (1, 2, 3)]
    shares = [
        round_record(n, n / 10, [client(c, trained=names[: c % 7], examples=5) for c in range(20)], **few)
        for n in (1, 2, 3)
    ]
    good = make_run(folder / LONG, rounds, num_rounds=3)
    others = [make_run(folder / f"{LONG}{seed}", shares, seed=seed, strategy="depthfl") for seed in (1, 2)]
    bad = make_run(folder / "bad", [round_record(1, None, [refused(0)])], "failed", "no client trained: " + "z" * 200)
    lost = table([("failed", "strategy=fedavg " + "y" * 60, "no such data set: " + "z" * 200)], ("state", "run", "why"))
    study = folder / "study.html"
    study.write_text(
        curves_html(group_runs([good]), says="1 of 2 runs done.", others=[Section("Lost", "", below=lost)])
    )
    return {
        "study": study,
        "report": write_report(good),
        "failed": write_report(bad),
        "without plotly": write_report(make_run(folder / "small", shares), plotly=False),
        "shares": write_report(others[0]),
        "compare": write_curves(group_runs([good, bad, *others]), folder / "curves.html"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["report", "failed", "without plotly", "shares", "compare", "study"])
def test_page(browser: Any, pages: dict[str, Path], kind: str, width: int, mode: str) -> None:
    show(browser, pages[kind], width, mode)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(BEYOND) == []
    assert browser.execute_script(OVERLAPS) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    background, text = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    assert [brightness(background) < 60, brightness(text) > 180] == [mode == "dark"] * 2
    # every figure of plotly was drawn, is named for those who do not see it, and its letters are the page's
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(each => [each.getAttribute('role'), each.ariaLabel,"
        " !!each.querySelector('.main-svg'), getComputedStyle(each.querySelector('.xtitle') || document.body).fill])"
    )
    assert (len(drawn) > 0) == (kind != "without plotly")
    for role, label, svg, fill in drawn:
        assert (role, svg) == ("img", True)
        assert len(label) > 15
        assert fill in (text, "rgb(0, 0, 0)"), "no title of an axis has its own colour"
    grids = browser.execute_script(
        "return [...document.querySelectorAll('svg.grid')].map(each => [each.getAttribute('role'), each.textContent.length])"
    )
    assert [role for role, words in grids if words > 40] == ["img"] * (kind in ("report", "without plotly", "shares"))
    for fill, shade, share, behind in browser.execute_script(CELLS):
        mixed = [share * a + (1 - share) * b for a, b in zip(rgb(shade), rgb(behind), strict=True)]
        assert contrast(rgb(fill), mixed) > 3.9, f"{fill} on a cell of {share:.0%}"


@pytest.mark.slow
def test_what_scrolls_shows_it(browser: Any, pages: dict[str, Path]) -> None:
    """A wide table has a shadow at the edge beyond which there is more, and none at its end; a wide drawing fades there."""
    show(browser, pages["report"], 390, "light")
    wide = "return [...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)"
    table, picture = (
        waiting.WebDriverWait(browser, 30).until(
            lambda page, what=what: page.execute_script(f"{wide}.find((each) => {what})")
        )
        for what in ("each.querySelector('table') && each.checkVisibility()", "each.querySelector('svg')")
    )
    assert greys(table, at=2)[1] == 255
    assert greys(table, at=-2)[1] < 240
    browser.execute_script("arguments[0].scrollLeft = 9999", table)
    assert greys(table, at=-2)[1] == 255
    assert greys(table, at=2)[1] < 240
    assert greys(picture, at=-2)[0] > 235, "nearly the page's own colour"
    browser.execute_script("document.querySelector('.drawn').classList.remove('drawn')")
    assert greys(picture, at=-2)[0] < 220, "cells go on there"


def show(browser: Any, page: Path, width: int, mode: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def greys(element: Any, at: int) -> tuple[int, int]:
    """The darkest and the lightest grey of an element's picture in the pixels' column `at`, from the right if negative."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    seen = image.open(io.BytesIO(element.screenshot_as_png)).convert("L")
    column = at % seen.width
    without_bar = element.get_property("clientHeight")
    lowest, highest = seen.crop((column, 0, column + 1, without_bar)).getextrema()
    return int(lowest), int(highest)


def rgb(colour: str) -> list[int]:
    """The values of `rgb(1, 2, 3)`."""
    return [int(value) for value in colour.partition("(")[2].rstrip(")").split(",")[:3]]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The contrast of two colours, from 1 to 21, as WCAG defines it."""

    def light(values: Sequence[float]) -> float:
        linear = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))


def brightness(colour: str) -> float:
    """The mean of a colour's `rgb(1, 2, 3)`."""
    return sum(rgb(colour)) / 3
