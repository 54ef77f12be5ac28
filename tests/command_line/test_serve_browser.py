"""The live page in a real browser, Chromium: it follows a run, outlives its server, fits a telephone, and needs no mouse."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import BEYOND
from report_helpers import make_run, refused, round_record
from serve_helpers import completed, going_on, next_round, served

from piecework.server_app.run_lock import run_lock

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BROWSER.exists() and DRIVER.exists()),
        reason=f"no {BROWSER} and {DRIVER}: apt-get install chromium chromium-driver",
    ),
]
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "disable-dev-shm-usage", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
)
WAIT = 120  # seconds, on a busy machine
Browser = Any


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def browser(started: Browser) -> Browser:
    """A window of a usual size, in light colours, without the messages of an earlier test."""
    resize(started, 1280)
    started.get("about:blank")
    started.get_log("browser")
    return started


def resize(browser: Browser, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def until(browser: Browser, script: str, expected: object) -> None:
    """Wait until a script returns this."""
    seen: list[object] = []

    def is_there(driver: Browser) -> bool:
        seen[:] = [driver.execute_script(f"return {script}")]
        return seen == [expected]

    try:
        WebDriverWait(browser, WAIT, poll_frequency=0.1).until(is_there)
    except Exception as error:
        raise AssertionError(f"{script} is {seen}, not {expected!r}: {browser.get_log('browser')}") from error


def text(selector: str) -> str:
    return f"document.querySelector('{selector}')?.textContent"


POINTS = "document.querySelectorAll('.subplot.xy .trace:first-child path.point').length"


def tab_to(browser: Browser, wanted: Callable[[Any], bool]) -> Any:
    """Press Tab until the focus is on what is wanted, which must be seen to be there."""
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
        if wanted(focused):
            assert focused.value_of_css_property("outline-style") != "none"
            return focused
    raise AssertionError("it cannot be reached by keyboard")


def messages(browser: Browser) -> list[str]:
    return [f"{each['level']}: {each['message']}" for each in browser.get_log("browser")]


def test_it_follows_a_run_to_its_end(tmp_path: Path, browser: Browser) -> None:
    run = going_on(tmp_path / "a", rounds=2, planned=4)
    with served(tmp_path) as address:
        with run_lock(run.path):
            browser.get(address)
            until(browser, text(".runs td .state"), "running")
            until(browser, text("#counts"), "1 running")
            browser.get(f"{address}/run/a")
            until(browser, POINTS, 2)
            until(browser, text("#says"), "2 of 4 rounds done, accuracy 2.00%")
            until(browser, text(".clients tbody tr:last-child td:last-child"), REFUSED.replace("N", "2"))
            begun = time.time()
            now = {"round": 3, "rounds": 4, "phase": "training", "asked": 2, "done": 1, "since": begun}
            (run.path / "now.json").write_text(json.dumps(now))
            until(
                browser, f"{text('#now-says')}?.split(', for ')[0]", "Round 3 of 4: training, 1 of 2 clients are done"
            )
            until(browser, "document.querySelector('#now-bar').value", 1)
            run.append_round(next_round(3))
            until(browser, POINTS, 3)
            until(browser, text("#says"), "3 of 4 rounds done, accuracy 3.00%")
            until(browser, "document.querySelector('#now').hidden", True)
            run.append_round(next_round(4))
            run.write_summary({"status": "completed", "reason": "", "rounds": 4, "seconds": 9.0})
        until(browser, text("#state"), "completed")
        until(browser, POINTS, 4)
        until(browser, text(".clients tbody tr:last-child td:last-child"), REFUSED.replace("N", "4"))
        assert messages(browser) == []
        assert browser.find_element("id", "says").get_attribute("aria-live") == "polite"
        alternatives = [
            each.get_attribute("aria-label") for each in browser.find_elements("css selector", "[role=img]")
        ]
    assert alternatives == [
        "Accuracy and loss: test accuracy rises from 1.0% (round 1) to 4.0% (round 4); test loss falls from 0.99 (round 1) to "
        "0.96 (round 4); training loss goes from 0.5 (round 1) to 0.5 (round 4)."
    ]


REFUSED = "round N: memory: needs 2,000 bytes, the budget allows 1,001"


def test_it_outlives_its_server(tmp_path: Path, browser: Browser) -> None:
    run = going_on(tmp_path / "a")
    with served(tmp_path) as address:
        browser.get(f"{address}/run/a")
        until(browser, POINTS, 2)
        browser.execute_script("window.sameDocument = true")
    until(browser, f"{text('#away')}?.slice(0, 33)", "The server has not answered since")
    run.append_round(next_round(3))
    with served(tmp_path, int(address.rpartition(":")[2])):
        until(browser, POINTS, 3)
        until(browser, "document.querySelector('#away').hidden", True)
        until(browser, "window.sameDocument", True)  # nothing was loaded again


def test_it_fits_a_telephone_and_follows_dark_mode(tmp_path: Path, browser: Browser) -> None:
    long = "a-very-long-name-of-a-run-" * 4
    clients = [refused(n, f"the {'long ' * 40}reason{'x' * 100}") for n in range(30)]
    reason = f"no client trained: {'y' * 200}"
    values: dict[str, Any] = {"dataset": f"npz:/data/{'z' * 150}.npz"}
    make_run(tmp_path / long, [round_record(1, 0.5, clients)], "failed", reason, **values)
    completed(tmp_path / "b")
    beyond, colours = {}, {}
    with served(tmp_path) as address:
        for path in ("/", f"/run/{long}", f"/report/{long}", f"/compare?run={long}&run=b"):
            for width in (390, 1280):
                for scheme in ("light", "dark"):
                    resize(browser, width, scheme)
                    browser.get(f"{address}{path}")
                    if path == "/":
                        until(browser, "document.querySelectorAll('.runs tbody tr').length", 2)
                    else:
                        until(browser, "document.querySelectorAll('.js-plotly-plot').length > 0", True)
                    beyond[path, width] = browser.execute_script(BEYOND)
                    if browser.execute_script("return document.documentElement.scrollWidth") > width:
                        beyond[path, width].append("the page")
                    colours[path, scheme] = browser.find_element("tag name", "body").value_of_css_property(
                        "background-color"
                    )
    assert {key: found for key, found in beyond.items() if found} == {}
    assert {colour for (_, scheme), colour in colours.items() if scheme == "light"} == {"rgba(255, 255, 255, 1)"}
    assert all(colours[path, "dark"] != colours[path, "light"] for path, _ in colours)
    assert messages(browser) == []


def test_it_is_used_by_keyboard(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path / "many", [round_record(1, 0.5, [refused(n) for n in range(25)])], "failed", "why")
    for seed, name in enumerate(("a", "b")):
        completed(tmp_path / name, seed=seed)
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, "document.querySelectorAll('.runs tbody tr').length", 3)
        for name in ("a", "b"):
            tab_to(browser, lambda it, name=name: it.get_attribute("value") == name).send_keys(Keys.SPACE)
        assert browser.find_element("id", "compare").text == "Compare 2 runs"
        browser.switch_to.active_element.send_keys(Keys.ENTER)  # as in any form
        until(browser, text("h1"), "Runs compared")
        tab_to(browser, lambda it: it.text == "All runs").send_keys(Keys.ENTER)
        until(browser, text("h1"), "Runs")
        until(browser, "document.querySelectorAll('.runs tbody tr').length", 3)
        tab_to(browser, lambda it: it.get_attribute("id") == "filter").send_keys("failed")
        until(browser, "[...document.querySelectorAll('.runs tbody tr')].filter((row) => !row.hidden).length", 1)
        tab_to(browser, lambda it: it.text == "many").send_keys(Keys.ENTER)
        until(browser, "document.querySelectorAll('.clients tbody tr').length", 20)
        tab_to(browser, lambda it: it.text == "Show all 25 clients").send_keys(Keys.ENTER)
        until(browser, "document.querySelectorAll('.clients tbody tr').length", 25)
        browser.find_element("tag name", "body").send_keys(Keys.HOME)
        browser.execute_script("document.activeElement.blur()")
        tab_to(browser, lambda it: it.text == "Report").send_keys(Keys.ENTER)
        until(browser, "document.querySelectorAll('.js-plotly-plot').length > 0", True)
        assert messages(browser) == []


def test_what_others_wrote_is_text_and_damage_is_said(tmp_path: Path, browser: Browser) -> None:
    script = "<img src=x onerror=window.harmed=1>"
    rounds = [round_record(1, 0.5, [refused(0, script)])]
    run = make_run(tmp_path / script, rounds, "failed", script, dataset=f"npz:{script}")
    with served(tmp_path) as address:
        browser.get(address)
        until(browser, text(".runs td a"), script)
        browser.find_element("link text", script).click()
        until(browser, text("#why"), script)
        until(browser, text(".reasons tbody td:last-child"), f"{script} (client 0, round 1)")
        assert browser.execute_script("return window.harmed ?? document.querySelectorAll('img').length") == 0
        with run.rounds_file.open("a") as file:
            file.write("{\n")
        until(browser, text("#state"), "damaged")
        until(browser, f"{text('#why')}?.slice(0, 32)", "rounds.jsonl, line 2, is damaged")
        assert messages(browser) == []
