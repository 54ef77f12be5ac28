"""Plan what a fleet can train of a model, and ask which system suits it; nothing is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecework.api.frames import choose_rows, make_frame
from piecework.api.keywords import Values, read_keywords, speak_of_keywords
from piecework.commands.options import Scalars, settings_from
from piecework.training.settings import Settings, SettingsError

if TYPE_CHECKING:
    import pandas

    from piecework.plans.question import PlanQuestion

Record = dict[str, Any]
WIDTH = 132  # columns of a plan as text


@dataclass(frozen=True)
class Plan:
    """What a fleet can train of a model. `record` is the object that `piecework plan --json` prints."""

    record: Record

    @property
    def full_memory_bytes(self) -> int:
        """Bytes of a training step of the whole model."""
        found: int = self.record["full_memory_bytes"]
        return found

    @property
    def participation(self) -> float:
        """The fraction of the clients that can train something, as a mean over stages and rounds."""
        found: float = self.record["fleet"]["participation"]
        return found

    @property
    def round_seconds(self) -> list[float]:
        """The simulated seconds of a round, by stage."""
        return [stage["round_seconds"] for stage in self.record["fleet"]["stages"]]

    @property
    def modules(self) -> list[Record]:
        """The pieces into which the model falls, each with its stage, parameters, bytes and FLOPs of a step."""
        found: list[Record] = self.record["modules"]
        return found

    @property
    def devices(self) -> list[Record]:
        """The fleet's kinds of device, each with its clients, its budgets, and by stage what its clients train."""
        found: list[Record] = self.record["devices"]
        return found

    def to_pandas(self, what: str = "devices") -> "pandas.DataFrame":
        """Return a frame with a line a kind of device and stage, or with `modules` a line a piece.

        Raises ValueError for another name, and ImportError without pandas.
        """
        own = ("device", "clients", "budget_bytes")
        rows = [{key: device[key] for key in own} | stage for device in self.devices for stage in device["stages"]]
        return make_frame(choose_rows(what, {"devices": rows, "modules": self.modules}))

    def draw(self, file: str | Path) -> Path:
        """Draw memory against budgets as .svg, .png or .pdf, and return the file. Raises ValueError if it cannot be written."""
        from piecework.plans.plan_view import draw

        draw(self.record, Path(file))
        return Path(file)

    def __str__(self) -> str:
        from piecework.plans.plan_view import plan_tables

        return show_text(plan_tables(self.record))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class Advice:
    """Which systems suit a fleet and a model. `record` is the object that `piecework plan --suggest --json` prints."""

    record: Record

    @property
    def recommended(self) -> dict[str, Any] | None:
        """The settings to give to `piecework.run` besides those that were asked about; None if nothing can train."""
        found = self.record["recommended"]
        return None if found is None else dict(found["settings"])

    @property
    def systems(self) -> list[Record]:
        """The systems that were planned, what one would try first before the others."""
        return [*self.record["first"], *self.record["others"]]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a frame with a line a system. Raises ImportError without pandas."""
        return make_frame(self.systems)

    def __str__(self) -> str:
        from piecework.plans.suggest_view import advice_tables

        return show_text(advice_tables(self.record))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def show_text(lines: Sequence[Any]) -> str:
    """Return sentences and tables as plain text."""
    from piecework.commands.console import PlainConsole

    file = StringIO()
    console = PlainConsole(file=file, width=WIDTH, force_jupyter=False)
    for line in lines:
        console.print(line, highlight=False)
    return file.getvalue().rstrip()


def asks_about_model(named: Scalars, preset: str) -> bool:
    """Return whether a model is named without a data set, so that it is planned for what it usually reads."""
    return "model" in named and "dataset" not in named and not preset


def ask_about(
    settings: Settings,
    named: Scalars,
    preset: str = "",
    input_shape: str | Sequence[int] = "",
    classes: int | None = None,
    examples: int | None = None,
    budget: str = "",
    precision: str = "",
    attack_steps: int | None = None,
) -> "PlanQuestion":
    """Return the question of a plan; `named` are the settings that were given by name. Raises SettingsError."""
    from piecework.plans.question import ask

    shape = input_shape if isinstance(input_shape, str) else "x".join(map(str, input_shape))
    usual = asks_about_model(named, preset)
    if shape and "dataset" in named:
        raise SettingsError(f"--input-shape {shape} and --dataset {named['dataset']}: give one of them")
    precise = precision or settings.training.precision
    return ask(settings, usual, shape, classes, examples, budget, precise, attack_steps)


def plan(settings: Values | None = None, /, *, preset: str | Path = "", **keywords: Any) -> Plan:
    """Plan, as `piecework plan` does: which pieces the model falls into on each device, and how long a round takes.

    Settings are given as to `piecework.run`. Besides them: `input_shape` (`(3, 224, 224)` or `"3x224x224"`) with `classes` in
    place of a data set, `examples` of a client, `budget` (`"60MB"`, `"0.2x"`), `precision` and `attack_steps`.

    Raises ValueError if a setting makes no sense or the budget allows no cut.
    """
    from piecework.plans.plan import make_plan

    with speak_of_keywords():
        return Plan(make_plan(*read_question(settings, preset, keywords)))


def suggest(
    settings: Values | None = None,
    /,
    *,
    preset: str | Path = "",
    tell: Callable[[str], None] = lambda _: None,
    **keywords: Any,
) -> Advice:
    """Advise which systems suit a fleet and a model, as `piecework plan --suggest` does; `tell` hears what is being planned.

    The arguments are those of `piecework.plan`. Raises ValueError if a setting makes no sense.
    """
    from piecework.plans.beside import usual_helpers
    from piecework.plans.suggest import advise

    with speak_of_keywords():
        return Advice(advise(*read_question(settings, preset, keywords), tell, usual_helpers()))


QUESTION = ("input_shape", "classes", "examples", "budget", "precision", "attack_steps")


def _require_type(key: str, value: Any) -> None:
    """Raise SettingsError for a value that an argument of a plan does not take."""
    if key == "input_shape":
        good = isinstance(value, str) or (
            isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
        )
        expected = "a tuple of numbers, or text as 3x224x224"
    elif key in ("budget", "precision"):
        good, expected = isinstance(value, str), "text"
    else:
        least = 0 if key == "attack_steps" else 1
        good = value is None or (isinstance(value, int) and value >= least)
        expected = f"a whole number from {least}"
    if not good:
        raise SettingsError(f"{key} = {value!r:.100}: expected {expected}")


def read_question(
    settings: Values | None, preset: str | Path, keywords: dict[str, Any]
) -> tuple[Settings, "PlanQuestion"]:
    """Return settings and the question of a plan. Raises ValueError."""
    asked = {key: keywords.pop(key) for key in QUESTION if key in keywords}
    for key, value in asked.items():
        _require_type(key, value)
    named = read_keywords(settings, keywords)
    chosen = settings_from(str(preset), [], named=named)
    return chosen, ask_about(chosen, named, preset=str(preset), **asked)
