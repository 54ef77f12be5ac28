"""What the commands have in common: consoles, options, error messages."""

import json
import logging
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, NoReturn

import click
import typer
from rich.text import Text
from typer.core import TyperCommand

from piecework import __version__
from piecework.api.runs import NO_RUN
from piecework.commands import complete
from piecework.commands.console import PlainConsole
from piecework.commands.options import OPTIONS, Scalars
from piecework.device_profiles.fleet_file import FleetError
from piecework.training.settings import Settings, SettingsError

out, err = PlainConsole(), PlainConsole(stderr=True)
BAD_INPUT, FAILED = 2, 1
INTERRUPTED, TERMINATED = 130, 143  # by Ctrl-C, by SIGTERM: 128 and the signal's number
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        help="a .toml file, or the name of a shipped one (piecework presets)",
        autocompletion=complete.one_of(complete.presets),
    ),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="a setting; may be repeated", autocompletion=complete.assignment),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="trace costs anew, neither reading nor writing those kept by other commands")
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]

Named = Scalars  # a command's parameter that `with_shorthands` replaces by options
# Options that stand for a setting, by its key: their types and their help.
SHORTHANDS: dict[str, tuple[type, str]] = {
    "strategy": (str, "a system (piecework strategies)"),
    "model": (str, "a model of the zoo, such as resnet18"),
    "dataset": (str, "a data set, or npz:FILE, folder:DIR, text:DIR"),
    "fleet": (str, "a shipped fleet (piecework devices), or a .toml file"),
    "num-rounds": (int, "rounds of the run"),
    "seed": (int, "seed of all random choices"),
}


def completion(key: str) -> complete.Complete | None:
    """Return what completes the value of a setting, if it has names."""
    return complete.one_of(complete.NAMED[key]) if key in complete.NAMED else None


def with_shorthands(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `named` of a command by the options of SHORTHANDS; it gets those that were given, by setting."""
    names = {key: f"{key.replace('-', '_')}_" for key in SHORTHANDS}
    shorthands = [
        Parameter(
            names[key],
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, typer.Option(OPTIONS[key], help=text, autocompletion=completion(key))],
        )
        for key, (kind, text) in SHORTHANDS.items()
    ]

    @wraps(command)
    def with_named(**arguments: Any) -> None:
        given = {key: arguments.pop(name) for key, name in names.items()}
        command(named={key: value for key, value in given.items() if value not in (None, "")}, **arguments)

    declared = signature(command, eval_str=True)
    parameters = [
        each
        for own in declared.parameters.values()
        for each in (shorthands if own.name == "named" else [own.replace(kind=Parameter.KEYWORD_ONLY)])
    ]
    with_named.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_named


def show_version(wanted: bool) -> None:
    """Print the version and exit, if that is `wanted`."""
    if wanted:
        print(f"piecework {__version__}")
        raise typer.Exit


class SettingsCommand(TyperCommand):
    """A command with --set, which tells how to give a setting that was written as an option, or as a word alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command line. Raises click.UsageError."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            own = {option for parameter in self.params for option in parameter.opts}
            if wanted := setting_among(words, own):
                raise click.UsageError(f"{error.message.rstrip('.')}: write {wanted}", ctx) from error
            raise


def setting_among(words: Sequence[str], options: Container[str]) -> str:
    """Return how --set would give the first setting that is among the words without it; empty if none is.

    A setting is known by its key, or by the last part of it: `--training.lr 0.1` and `lr=0.1` give `--set training.lr=0.1`.
    What is one of the command's own options is none.
    """
    keys = Settings().to_run_config()
    for before, word, after in zip(["", *words], words, [*words[1:], "--"], strict=False):
        key, assigned, value = word.lstrip("-").partition("=")
        if before in ("--set", "--sweep") or f"--{key}" in options or not (word.startswith("--") or assigned):
            continue
        found = [key] if key in keys else [name for name in keys if key == name.rpartition(".")[2]]
        given = value if assigned else "VALUE" if after.startswith("--") else after
        if found:
            return " or ".join(shlex.join(("--set", f"{name}={given}")) for name in found)
    return ""


class ConsoleHandler(logging.Handler):
    """Handler for a run's log: lines on stderr, warnings in bold."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        style = "bold" if record.levelno >= logging.WARNING else None
        err.print(record.getMessage(), style=style, highlight=False, soft_wrap=True)


def listen() -> None:
    """Print what the run logs; installs the handler once per process."""
    log = logging.getLogger("piecework")
    if not any(isinstance(handler, ConsoleHandler) for handler in log.handlers):
        log.addHandler(ConsoleHandler())
        log.setLevel(logging.INFO)


@contextmanager
def user_errors(as_json: bool, answer: dict[str, Any] = NO_RUN) -> Iterator[None]:
    """Turn bad input into one message and exit code 2, and Ctrl-C into exit code 130.

    With --json bad input also prints an object on stdout, `answer` and the reason.
    """
    from piecework.federation.errors import RunAbortedError, TooFewNodesError

    try:
        yield
    except (SettingsError, FleetError, ValueError, OSError, ImportError, TooFewNodesError, RunAbortedError) as error:
        give_up(str(error), as_json, answer)
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def tell_steps(doing: str, *, silent: bool) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr what is being done, from a function that is told each step; `silent` shows nothing."""
    if silent or not err.is_terminal:
        yield lambda _: None
        return
    with err.status(f"{doing} ..") as status:
        yield lambda step: status.update(Text(f"{doing} {step} .."))


def give_up(message: str, as_json: bool, answer: dict[str, Any]) -> NoReturn:
    """Print what was wrong, and exit."""
    if as_json:
        print(json.dumps(answer | {"reason": message}))
    err.print(Text.assemble(("error:", "red"), f" {message}"), soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def show_lines(lines: Iterable[Any]) -> None:
    """Print sentences and tables; strings, and texts that do not wrap, in one line each, however narrow the terminal is."""
    for line in lines:
        one_line = isinstance(line, str) or (isinstance(line, Text) and bool(line.no_wrap))
        out.print(line, soft_wrap=one_line, highlight=False)
