"""What a run shows while it runs: on a terminal of 80 columns, and where there is none."""

import io
import re

import pytest
from report_helpers import client, refused, round_record

from piecework.commands.console import PlainConsole
from piecework.device_profiles.user_cache import NO_CACHE
from piecework.models.zoo import build_blueprint
from piecework.planning import costs
from piecework.planning.now import NOW, doing, tracing
from piecework.planning.part import whole_model
from piecework.report.progress import Now, RoundProgress, show_waiting
from piecework.training.settings import Settings

ATTACKED = {"adversarial_accuracy": 0.375, "stage": "module 1", "modules": 7}


def terminal(width: int = 80) -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=width, force_terminal=True, _environ={"TERM": "xterm"})


def screen(console: PlainConsole, shown: RoundProgress | None = None) -> list[str]:
    """What a terminal shows after all that was written to it, and is drawn now of what is still `shown`."""
    if shown is not None and shown.progress is not None:
        shown.progress.refresh()
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", console.file.getvalue()):  # type: ignore[attr-defined]
        if part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_progress_without_a_terminal() -> None:
    console = PlainConsole(file=io.StringIO(), width=40)
    with RoundProgress(3, console) as progress:
        progress.update(round_record(1, 0.25, [client(0), refused(1)]))
        progress.update(round_record(2, None, [client(0, device="[red]")], seconds=4.0, enforced=False))
        progress.update(round_record(3, None, [client(0)], seconds=3.0) | {"stage": "map, block 3", "blocks": 4})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "round 1/3  accuracy 25.0%  loss 0.750  1/2 clients ok  peak 90.0% of budget  2.0 s/round  4.0 s left",
        "round 2/3  1/1 clients ok  3.0 s/round  3.0 s left",
        "round 3/3  map, block 3 of 4  1/1 clients ok  peak 90.0% of budget  3.0 s/round",
    ]


def test_a_round_is_a_line_and_the_bar_is_the_last() -> None:
    console = terminal()
    with RoundProgress(3, console) as progress:
        doing("round %s: training", 1)
        progress.update(round_record(1, 0.25, [client(0), refused(1)]))
        progress.update(round_record(2, 0.5, [client(0)], seconds=4.0))
        doing("round %s: training", 3)
        first, second, bar = screen(console, progress)
    assert first == "round 1/3  accuracy 25.0%  loss 0.750  1/2 clients ok  peak 90.0% of budget"
    assert second == "round 2/3  accuracy 50.0%  loss 0.500  1/1 clients ok  peak 90.0% of budget"
    assert re.fullmatch(r". ━{10}[╸╺]?━+ \d:\d\d:\d\d round 3: training  3.0 s/round  3.0 s left", bar)
    assert max(map(len, (first, second, bar))) <= 80
    assert screen(console)[-1].endswith("2 of 3 rounds")


def test_a_wide_terminal_shows_the_details_of_a_round() -> None:
    """As they are when the bar is drawn, not when they were told."""
    console = terminal(120)
    left = "training ends in 4 s"
    with RoundProgress(3, console) as progress:
        doing("round 1: training 2/10", details=lambda: f"{left}  slowest: slow (client 1)")
        bar = screen(console, progress)[-1]
        assert bar.endswith(" round 1: training 2/10  training ends in 4 s  slowest: slow (client 1)")
        left = "training is late by 20 s"
        bar = screen(console, progress)[-1]
        assert bar.endswith(" round 1: training 2/10  training is late by 20 s  slowest: slow (client 1)")
        progress.update(round_record(1, 0.25, [client(0)]))
        doing("round 2: training 3/10", details=lambda: "slowest: slow (client 1)")
        bar = screen(console, progress)[-1]
    assert bar.endswith(" round 2: training 3/10  2.0 s/round  4.0 s left  slowest: slow (client 1)")


@pytest.mark.parametrize("width", [80, 50, 40])
def test_no_text_takes_the_place_of_bar_and_time(width: int) -> None:
    console = terminal(width)
    with RoundProgress(500, console) as progress:
        progress.update(round_record(12, 0.5, [client(n) for n in range(10)], seconds=5000.0, **ATTACKED))
        doing("a text that is much longer than what is left of the line of a terminal %s", "x" * 80)
        bar = screen(console, progress)[-1]
    assert re.match(r". ━{16} \d:\d\d:\d\d a text", bar)
    assert len(bar) <= width
    assert "1/500" not in bar


def test_tracing_says_that_it_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_CACHE, "1")
    blueprint = build_blueprint("convnet", num_classes=10, input_shape=(1, 8, 8))
    terminal_now, plain = terminal(), PlainConsole(file=io.StringIO(), width=80)
    for console in (terminal_now, plain):
        monkeypatch.setattr(costs, "_TRACED", {})  # what other tests of this process traced
        with RoundProgress(3, console) as progress:
            costs.cost_model_for(Settings(), blueprint).trace(whole_model(blueprint))
            tracing("convnet")
            if console is terminal_now:
                assert screen(console, progress)[-1].endswith("tracing the parts of convnet (2)")
    assert screen(plain) == ["tracing the parts of convnet"]
    assert not any(isinstance(handler, Now) for handler in NOW.handlers)


def test_a_plan_says_so_on_a_terminal_only() -> None:
    console, plain = terminal(), PlainConsole(file=io.StringIO(), width=80)
    for each in (console, plain):
        with show_waiting(each, "planning"):
            tracing("[convnet]")
    assert "tracing the parts of [convnet]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert plain.file.getvalue() == ""  # type: ignore[attr-defined]
