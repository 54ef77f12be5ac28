"""The command line on this machine; `commands.deploy` adds the commands of real federations."""

import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from piecework.api.plans import Advice, Plan, ask_about, asks_about_model
from piecework.api.runs import COUNTED, carry_out
from piecework.commands.base import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    Json,
    Named,
    NoCache,
    Preset,
    Set,
    SettingsCommand,
    err,
    listen,
    out,
    show_lines,
    show_version,
    tell_steps,
    user_errors,
    with_shorthands,
)
from piecework.commands.deploy import commands
from piecework.commands.export import export  # noqa: F401  (adds the command)
from piecework.commands.lists import lists
from piecework.commands.new import new  # noqa: F401  (adds the command)
from piecework.commands.options import (
    Scalars,
    connection_to,
    merge_assignments,
    options_given,
    run_command,
    seeds_from,
    settings_from,
    words_of,
)
from piecework.commands.results import results
from piecework.commands.serve import serve  # noqa: F401  (adds the command)
from piecework.commands.studies import Strategies, Sweep, options_of_runs, run_study, studies
from piecework.device_profiles.user_cache import trace_anew
from piecework.engines.cluster.address import RayCluster
from piecework.engines.processes import Connection
from piecework.server_app.signals import end_on_hangup
from piecework.training.settings import Settings, SettingsError

if TYPE_CHECKING:
    from piecework.plans.question import PlanQuestion
    from piecework.server_app.records import RunDir

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does that itself
)
app.add_typer(results)
app.add_typer(studies)
app.add_typer(lists)
app.add_typer(commands)


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="the version")
    ] = False,
) -> None:
    """Train one model across devices none of which can hold it."""


@app.command(cls=SettingsCommand)
@with_shorthands
def run(
    preset: Preset = "",
    named: Named = {},  # noqa: B006 (typer reads it, nothing changes it)
    engine: Annotated[str, typer.Option(help="local, ray or deployment")] = "",
    nodes: Annotated[int, typer.Option(help="number of clients; deployment without it starts 4")] = 0,
    assignments: Set = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="several runs, e.g. 1,2,3")] = "",
    strategies: Strategies = "",
    sweep: Sweep = [],  # noqa: B006
    study: Annotated[str, typer.Option(metavar="NAME", help="go on with a study, or name a new one")] = "",
    output_dir: Annotated[str, typer.Option(help="where runs are written")] = "",
    restarts: Annotated[int, typer.Option(min=0, help="maximum number of times to resume a crashed run")] = 0,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="train on the nodes of a running SuperLink")] = "",
    root_certificates: Annotated[Path | None, typer.Option(help="the CA of that SuperLink's certificate")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="that SuperLink has no TLS")] = False,
    ray_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="with --engine ray: the cluster to join; auto: this machine's")
    ] = "",
    fail_on_excluded_class: Annotated[
        bool,
        typer.Option("--fail-on-excluded-class", help="exit code 1 where no client of a device class ever trained"),
    ] = False,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Train. Without options: FeDepth on handwritten digits over 20 emulated boards."""
    listen()
    with user_errors(as_json), trace_anew(no_cache):
        connection = connection_to(superlink, root_certificates, insecure, ray_address)
        if study or strategies or sweep:
            asked = merge_assignments(assignments, options_given(engine, nodes, output_dir) | named)
            options = options_of_runs(restarts, connection, no_cache)
            run_study(study, preset, asked, (strategies, sweep, seeds), options, fail_on_excluded_class, as_json)
            return
        settings = settings_from(
            preset,
            assignments,
            engine=engine,
            nodes=nodes,
            output_dir=output_dir,
            named=named,
            connection=connection,
        )
        numbers = seeds_from(seeds, assignments, named, settings)
        summaries = run_seeds(settings, numbers, restarts, as_json, connection)
        excluded = [text for summary in summaries for text in summary.get("excluded_classes", {}).values()]
        if fail_on_excluded_class and excluded:
            err.print(f"--fail-on-excluded-class: {'; '.join(dict.fromkeys(excluded))}", soft_wrap=True)
        if (fail_on_excluded_class and excluded) or any(s["status"] != "completed" for s in summaries):
            raise typer.Exit(FAILED)


def run_seeds(
    settings: Settings, seeds: list[int], restarts: int, as_json: bool, connection: Connection | RayCluster | None
) -> list[dict[str, Any]]:
    """Run each seed and return the summaries. Exits where a signal ended a run, unless it was the last one and complete."""
    summaries: list[dict[str, Any]] = []
    told = err if as_json else out
    for number, seed in enumerate(seeds, start=1):
        if len(seeds) > 1:
            told.print(f"seed {seed} ({number} of {len(seeds)})", style="bold", highlight=False)
        summary, ended_by = run_one(settings, seed, len(seeds) > 1, restarts, as_json, connection)
        summaries.append(summary)
        if ended_by and (rest := seeds[number:]):
            err.print(f"interrupted: not run: seed {', '.join(map(str, rest))}", highlight=False)
        if ended_by and (rest or summary["status"] != "completed"):
            raise typer.Exit(ended_by)
    if len(seeds) > 1:
        from piecework.report.seeds import summarise_seeds

        told.print(summarise_seeds(seeds, summaries), soft_wrap=True, highlight=False)
        if as_json:
            print(json.dumps(over_seeds(summaries)))
    return summaries


def run_one(
    settings: Settings,
    seed: int,
    several: bool,
    restarts: int,
    as_json: bool,
    connection: Connection | RayCluster | None,
) -> tuple[dict[str, Any], int]:
    """Run one seed, with progress on stderr and the summary on stdout.

    Returns the summary, and the exit code of the signal that ended the run, or 0.
    """
    from piecework.engines.launch import SuperLinkLostError
    from piecework.report.progress import RoundProgress
    from piecework.server_app.run_folder import COMPLETED, STOPPED

    name = f"{settings.run_name}-seed{seed}" if several and settings.run_name else settings.run_name
    settings = settings.with_values({"seed": seed, "run-name": name})
    found = carry_out(settings, RoundProgress(settings.num_rounds, err), restarts, connection)
    show_run(found.run_dir, found.summary, found.reason, as_json)
    kept = found.summary["status"] != COMPLETED and found.run_dir.last_complete_round()
    going_on = isinstance(found.error, SuperLinkLostError)  # perhaps: its message says to look after it first
    if (kept and not going_on) or found.summary["status"] == STOPPED:
        err.print(how_to_go_on(found.run_dir, connection), highlight=False, soft_wrap=True)
    return found.summary, code_of(found.signal)


def code_of(signal: BaseException | None) -> int:
    """Return the exit code of the signal that ended a run, or 0."""
    if signal is None:
        return 0
    if isinstance(signal, SystemExit):
        return signal.code if isinstance(signal.code, int) else TERMINATED
    return INTERRUPTED


def show_run(run_dir: "RunDir", summary: dict[str, Any], reason: str, as_json: bool) -> None:
    """Print a run's summary on stdout, and on stderr why it did not complete."""
    from piecework.report.display import memory_table, step_rows, step_table, summary_table
    from piecework.report.first_sentence import first_sentence

    if as_json:
        print(json.dumps(summary))
    elif run_dir.has_begun():
        rounds = run_dir.rounds()
        out.print(first_sentence(run_dir.settings(), rounds, run_dir.final(), summary["status"]), highlight=False)
        out.print(summary_table(summary, rounds, run_dir.final()))
        if rounds:
            out.print(memory_table(rounds))
        if step_rows(rounds):
            out.print(step_table(rounds))
        out.print(f"run folder: {run_dir.path}", soft_wrap=True)
    if summary["status"] != "completed":
        why = reason or summary["reason"]
        err.print(Text.assemble((f"{summary['status']}:", "red"), f" {why}"), soft_wrap=True)


def how_to_go_on(run_dir: "RunDir", connection: Connection | RayCluster | None) -> str:
    """Return the command that resumes a stopped run."""
    if not run_dir.has_begun():
        return "nothing has been written yet: run the same command again"
    command = ["piecework", "run", "--set", f"resume-from={run_dir.path}"]
    command += words_of(connection)
    return f"resume it: {shlex.join(command)}"


def over_seeds(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise several runs: sums, accuracies with their spreads, the largest peak, and the runs themselves."""
    from piecework.report.seeds import accuracies

    finished = [s for s in summaries if s["status"] == "completed"]
    peaks = [s["max_peak_over_budget"] for s in finished if s["max_peak_over_budget"] is not None]
    return {
        "run_dir": [s["run_dir"] for s in summaries],
        "status": "completed" if len(finished) == len(summaries) else "failed",
        **accuracies(finished),
        "max_peak_over_budget": max(peaks, default=None),
        **{key: sum(s.get(key, 0) for s in summaries) for key in COUNTED},
        "runs": summaries,
    }


@app.command(cls=SettingsCommand)
@with_shorthands
def plan(
    preset: Preset = "",
    named: Named = {},  # noqa: B006
    input_shape: Annotated[str, typer.Option(help="instead of a data set: 3x224x224, or 500 tokens")] = "",
    classes: Annotated[int | None, typer.Option(min=1, max=10**6, help="number of classes, with --input-shape")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, max=10**7, help="training examples per client; default: an equal part, or 500")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="examples per step")] = None,
    budget: Annotated[
        str, typer.Option(help="cut for 60MB, 57MiB or 0.2x of the full model; default: the fleet's minimum")
    ] = "",
    memory_model: Annotated[str, typer.Option(help="traced, or a paper's (piecework settings memory.model)")] = "",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16 (traced); default: that of the settings")] = "",
    attack_steps: Annotated[
        int | None, typer.Option(min=0, max=1000, help="PGD steps of a training step; default: the system's own")
    ] = None,
    nodes: Annotated[int, typer.Option(help="number of clients")] = 0,
    picture: Annotated[str, typer.Option(metavar="FILE", help="draw memory against budgets: .svg, .png or .pdf")] = "",
    suggest: Annotated[bool, typer.Option("--suggest", help="recommend systems for this fleet and model")] = False,
    device: Annotated[str, typer.Option(help="how a device of the fleet could hold the whole model")] = "",
    assignments: Set = [],  # noqa: B006
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Show which pieces a model falls into, which device can train which, and how long a round takes; nothing is trained."""
    from piecework.plans.plan import make_plan
    from piecework.report.progress import show_waiting

    with user_errors(as_json, {}), trace_anew(no_cache):
        own: Scalars = {"memory.model": memory_model, "training.batch-size": batch_size or 0}
        given = named | {key: value for key, value in own.items() if value}
        settings = settings_from(preset, assignments, nodes=nodes, named=given)
        if suggest and picture:
            raise SettingsError(f"--picture {picture}: a picture shows one plan, --suggest makes several")
        if suggest and device:
            raise SettingsError(f"--device {device}: --suggest shows how the poorest device could; leave --suggest out")
        question = ask_about(settings, named, preset, input_shape, classes, examples, budget, precision, attack_steps)
        if suggest:
            data = "DATASET" if input_shape or asks_about_model(named, preset) else ""
            asked: Scalars = {"dataset": data, "training.precision": precision, "attack.steps": attack_steps or ""}
            given |= {key: value for key, value in asked.items() if value}
            show_advice(settings, question, lambda own: run_command(preset, assignments, given | own, nodes), as_json)
            return
        if device:
            show_ladder(settings, question, device, as_json)
            return
        with show_waiting(err, "planning"):
            found = Plan(make_plan(settings, question))
        show_plan(found, picture, as_json, hint=not preset and ":" not in settings.model + settings.dataset)


def show_advice(settings: Settings, question: "PlanQuestion", command: Callable[[Scalars], str], as_json: bool) -> None:
    """Print advice; `command` makes the command line of a run with the recommended settings."""
    from piecework.plans.beside import usual_helpers
    from piecework.plans.suggest import advise
    from piecework.plans.suggest_view import advice_tables

    with tell_steps("planning", silent=as_json) as tell:
        advice = Advice(advise(settings, question, tell, usual_helpers()))
    if advice.recommended is not None:
        advice.record["recommended"]["command"] = command(advice.recommended)
    print(json.dumps({"suggest": advice.record})) if as_json else show_lines(advice_tables(advice.record))


def show_ladder(settings: Settings, question: "PlanQuestion", device: str, as_json: bool) -> None:
    """Print how a device could hold the whole model, beside the systems that cut it."""
    from piecework.plans.ladder import climb
    from piecework.plans.ladder_view import ladder_tables
    from piecework.report.progress import show_waiting

    with show_waiting(err, "planning"):
        found = climb(settings, question, device)
    print(json.dumps({"ladder": found})) if as_json else show_lines(ladder_tables(found))


def show_plan(found: Plan, picture: str, as_json: bool, *, hint: bool) -> None:
    """Print a plan, with a `hint` at presets, and draw its picture where a file for it is named."""
    from piecework.plans.plan_view import plan_tables

    if picture:
        found.draw(picture)
    if as_json:
        print(json.dumps(found.record))
        return
    show_lines(plan_tables(found.record))
    if picture:
        out.print(f"picture: {picture}", soft_wrap=True)
    elif hint:
        out.print("to train in a published setting: piecework presets", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this process: the console script, or a script of one's own."""
    run_app: Callable[[Sequence[str] | None], Any] = app
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that started processes are stopped
    end_on_hangup()
    run_app(arguments)


if __name__ == "__main__":
    main()
