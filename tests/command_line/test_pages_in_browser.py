"""The pages of runs in a real browser, at two widths, light and dark; and nothing of them overflows, fails or stays white."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_helpers import client, make_run, refused, round_record

from piecework.report.compare import group_runs
from piecework.report.compare_view import curves_html, write_curves
from piecework.report.page import Section, table
from piecework.report.run_page import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, of the extra dev, is not installed")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")
OFFLINE = ("quic", "gpu", "background-networking", "component-update", "sync", "dev-shm-usage")
LONG = "a-run-whose-name-has-no-blank-and-is-long-" * 4


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
    own = {"trained": names, "pieces": [[*range(12)], [*range(12, 20)]], "examples": 5, "device": "board-" + "x" * 60}
    some = {"aggregated": True, "examples": 30, "trained": trained}
    rounds = [round_record(n, n / 10, [client(0, **own), refused(1, "y" * 300)], **some) for n in (1, 2, 3)]
    good = make_run(folder / LONG, rounds, num_rounds=3)
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
        "without plotly": write_report(make_run(folder / "small", rounds), plotly=False),
        "compare": write_curves(group_runs([good, bad]), folder / "curves.html"),
    }


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["report", "failed", "without plotly", "compare", "study"])
def test_page(browser: Any, pages: dict[str, Path], kind: str, width: int, mode: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(pages[kind].as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
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
    assert [role for role, words in grids if words > 40] == ["img"] * (kind in ("report", "without plotly"))


def brightness(colour: str) -> float:
    """The mean of a colour's `rgb(1, 2, 3)`."""
    values = [int(value) for value in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    return sum(values) / 3
