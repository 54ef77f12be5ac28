"""The report's sections of adversarial training.

They show the trained model under attack, robustness over the rounds, and for a cascade how accurate the modules before a stage
were, how it was attacked, and which clients trained which part.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from piecework.models.model_file import description
from piecework.report.display import Record
from piecework.report.page import COLOURS, Section, graph_objects, label, line, mark_stages, over_rounds, panels, table
from piecework.server_app.round_line import percent

ATTACKS = {"apgd-ce": "APGD-CE", "apgd-t": "APGD-T", "fab-t": "FAB-T", "square": "Square"}
NORMS = {"l2": "L2", "linf": "L-infinity"}
STAGE_COLUMNS = ("stage", "rounds", "attacked from", "distance", "alpha", "epsilon", "builds on")
DEPTH_COLUMNS = ("stage", "trained", "updates", "fraction", "clients", "devices")
DEPTHS = [[0.0, "#eaf3fa"], [1.0, COLOURS[0]]]  # white is for what no client trained
CLEAN_AND_ATTACKED = (
    ("on the test data", "accuracy", "adversarial_accuracy"),
    ("on the clients' validation data", "client_accuracy", "client_adversarial_accuracy"),
)


def is_adversarial(rounds: Sequence[Record]) -> bool:
    """Return whether anything was evaluated under attack."""
    return any(r.get(key) is not None for r in rounds for _, _, key in CLEAN_AND_ATTACKED)


def is_cascade(rounds: Sequence[Record]) -> bool:
    """Return whether the model was trained module after module."""
    return any(r.get("modules", 1) > 1 for r in rounds)


def final_section(final: Record, settings: Record, path: Path) -> Section:
    """Return the section of the trained model, clean and under each attack."""
    rows = [("none", "all test images", percent(final["accuracy"]))]
    if final["adversarial_accuracy"] is not None:
        rows.append((f"PGD-{final['attack_steps']}", str(final["attacked"]), percent(final["adversarial_accuracy"])))
    below = ""
    if found := final.get("autoattack"):
        images = str(found["images"])
        rows.append(("none, the images of AutoAttack", images, percent(found["clean_accuracy"])))
        names = [ATTACKS.get(name, name) for name in found["after"]]
        for i, accuracy in enumerate(found["after"].values(), start=1):
            so_far = " + ".join(names[:i])
            rows.append((f"AutoAttack: {so_far}" if i == len(names) else so_far, images, percent(accuracy)))
        warnings = "".join(f"<li>{escape(sentence)}</li>" for sentence in found["warnings"])
        below = (
            f"<h3>AutoAttack warns</h3><ul>{warnings}</ul>"
            if warnings
            else "<p>AutoAttack's checks found nothing that makes its result doubtful.</p>"
        )
    epsilon = float(settings["attack.epsilon"])
    caption = (
        f"{which_model(path)}On the test data; attacks move a pixel by at most {epsilon * 255:.3g}/255. Images that are wrong "
        "unattacked count as wrong."
    )
    return Section(
        "The trained model under attack", caption, None, table(rows, ("attack", "images", "accuracy")) + below
    )


def which_model(path: Path) -> str:
    """Return a sentence if the run ended before the whole cascade was trained, else an empty text."""
    if not path.is_file() or description(path).get("head", "head") == "head":
        return ""
    described = description(path)
    return (
        f"The run ended in the middle of the cascade: the model is {atom_range(described['atoms'])} with the auxiliary head "
        f"{described['head']}. "
    )


def robust_curves(rounds: Sequence[Record], settings: Record) -> list[Section]:
    """Return the sections of clean and adversarial accuracy below each other, and of the losses."""
    validators = "all clients" if settings.get("fedprophet.validation-clients") == "all" else "the clients of a round"
    steps, images = settings["evaluation.attack-steps"], settings["evaluation.attack-examples"]
    shown = [p for p in CLEAN_AND_ATTACKED if any(r.get(key) is not None for r in rounds for key in p[1:])]
    titles = [title for title, _, _ in shown]
    figure = panels(len(shown), subplot_titles=titles)
    for panel, (_, *keys) in enumerate(shown, start=1):
        for i, (key, name) in enumerate(zip(keys, ("clean", f"under PGD-{steps}"), strict=True)):
            if points := [(r["round"], r[key]) for r in rounds if r.get(key) is not None]:
                first = not any(trace.name == name for trace in figure.data)
                trace = line(points, name, (2, 4)[i]).update(legendgroup=name, showlegend=first)
                figure.add_trace(trace, row=panel, col=1)
    figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="tozero")
    losses = graph_objects().Figure()
    for i, (key, name) in enumerate((("loss", "test loss"), ("train_loss", "training loss"))):
        if points := [(r["round"], r[key]) for r in rounds if r[key] is not None]:
            losses.add_trace(line(points, name, i))
    losses.update_yaxes(title="loss", rangemode="tozero")
    of_modules = (
        " Of the modules up to the one in training, with its head; dashed: one module was fixed, the next began."
        if is_cascade(rounds)
        else ""
    )
    clean = "in warm-up rounds"
    if any("adversarial_clients" in record for record in rounds):
        clean += ", and of clients without memory for an attack"
    trained = f"Test loss: clean. Training loss: mean of the clients, of adversarial examples (clean ones {clean})"
    return [
        Section(
            "Accuracy, clean and under attack",
            f"Test data: all images, attacked at most {images}. Validation data: what {validators} held back."
            + of_modules,
            mark_stages(over_rounds(figure, rounds), rounds),
        ),
        Section("Loss", f"{trained}.", mark_stages(over_rounds(losses, rounds), rounds)),
    ]


def cascade_sections(rounds: Sequence[Record], settings: Record) -> list[Section]:
    """Return the sections of each stage's perturbation, and of which clients trained which part."""
    norm = NORMS.get(str(settings["fedprophet.feature-norm"]), str(settings["fedprophet.feature-norm"]))
    return [
        Section(
            "Adaptive perturbation",
            "Epsilon: radius of the ball in which a module's inputs are attacked in training. Those of the first module are "
            f"images (L-infinity, fixed); those of later ones are features ({norm}): alpha times the mean distance by which an "
            "attack moves the output of the module before. Rounds without attack have no point. A stage builds on the modules "
            "before it, as accurate as they were on validation data.",
            perturbation_figure(rounds, norm),
            f'<div class="stages">{table(stage_rows(rounds), STAGE_COLUMNS)}</div>',
        ),
        Section(
            "Modules trained",
            "Fraction of a stage's accepted updates in which an atom was trained: the stage's module by all, further ones by "
            "the clients whose memory and speed allowed.",
            depth_figure(rounds),
            f'<div class="stages">{table(depth_rows(rounds), DEPTH_COLUMNS)}</div>',
        ),
    ]


def perturbation_figure(rounds: Sequence[Record], norm: str) -> Any:
    """Draw epsilon and alpha below each other; the ball around images has another norm and its own line."""
    figure = panels(2)
    lines = (
        ("epsilon", f"epsilon, features ({norm})", 1, False),
        ("epsilon", "epsilon, images (L-infinity)", 1, True),
        ("alpha", "alpha", 2, False),
    )
    for i, (key, name, panel, images) in enumerate(lines):
        points: list[tuple[float, float | None]] = []
        for _, records in by_stage(rounds):
            attacked = [r for r in records if not r["clean_round"] and (r["distance"] is None) == images]
            # None ends the line where the stage ends
            points += [*((r["round"], r[key]) for r in attacked), (records[-1]["round"] + 0.5, None)]
        if any(value is not None for _, value in points):
            figure.add_trace(line(points, name, i), row=panel, col=1)
    if len(rounds) > 40:  # a stage may have been attacked in a single round, which needs a mark instead of a line
        figure.update_traces(mode="lines+markers", marker_size=3)
    figure.update_yaxes(title="epsilon", rangemode="tozero", row=1).update_yaxes(
        title="alpha", rangemode="tozero", row=2
    )
    return mark_stages(over_rounds(figure, rounds), rounds)


def stage_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a stage's rounds, first and last alpha and epsilon, and the accuracies of the modules before it."""
    rows: list[tuple[str, ...]] = []
    for stage, records in by_stage(rounds):
        attacked = [r for r in records if not r["clean_round"]]
        fixed = [records[0][key] for key in ("fixed_accuracy", "fixed_adversarial_accuracy")]
        features = records[0]["distance"] is not None
        rows.append(
            (
                stage,
                span([r["round"] for r in records]),
                str(attacked[0]["round"]) if attacked else "-",
                f"{records[0]['distance']:.4g}" if features else "images",
                from_to([r["alpha"] for r in attacked]) if features else "-",
                from_to([r["epsilon"] for r in attacked]),
                "-" if fixed[0] is None else f"{percent(fixed[0], 1)}, attacked {percent(fixed[1], 1)}",
            )
        )
    return rows


def depth_figure(rounds: Sequence[Record]) -> Any:
    """Draw atoms over stages, darker the more of the stage's updates include them."""
    by_stages: list[dict[int, float]] = []
    for _, records in by_stage(rounds):
        counts, updates = defaultdict[int, float](float), trained(records)
        for _, atoms in updates:
            for atom in atoms:
                counts[atom] += 1 / len(updates)
        by_stages.append(counts)
    names = [stage for stage, _ in by_stage(rounds)]
    last = max((atom for counts in by_stages for atom in counts), default=0)
    figure = graph_objects().Figure()
    figure.add_heatmap(
        x=[label(name) for name in names],
        y=list(range(last + 1)),
        z=[[counts.get(atom) for counts in by_stages] for atom in range(last + 1)],
        zmin=0,
        zmax=1,
        colorscale=DEPTHS,
        colorbar={"tickformat": "~%", "thickness": 12},
        xgap=2,
        ygap=1,
        hovertemplate="%{x}, atom %{y}: %{z:.1%}<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    return figure.update_yaxes(title="atom", autorange="reversed", tickformat="d", showgrid=False, zeroline=False)


def depth_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return, by stage and range of atoms, the updates, their fraction of the stage's, and their devices."""
    rows: list[tuple[str, ...]] = []
    for stage, records in by_stage(rounds):
        updates, found = trained(records), defaultdict[tuple[int, ...], list[Record]](list)
        for client, atoms in updates:
            found[atoms].append(client)
        for atoms, of_these in sorted(found.items()):
            count, clients = len(of_these), len({c["client"] for c in of_these})
            devices = ", ".join(sorted({c["device"] for c in of_these}))
            fraction = percent(count / len(updates), 1)
            rows.append((stage, atom_range(atoms), str(count), fraction, str(clients), devices))
    return rows


def trained(records: Iterable[Record]) -> list[tuple[Record, tuple[int, ...]]]:
    """List the clients whose updates entered the model, with the atoms they trained."""
    return [
        (client, tuple(sorted(atom for piece in client["pieces"] for atom in piece)))
        for record in records
        for client in record["clients"]
        if client["status"] == "ok" and client["pieces"]
    ]


def by_stage(rounds: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Return the rounds of each stage."""
    return [(stage, list(records)) for stage, records in groupby(rounds, key=lambda record: str(record["stage"]))]


def atom_range(atoms: Sequence[int]) -> str:
    """Format atoms as `atom 3` or `atoms 0 to 2`; those of a cascade are consecutive."""
    return f"atom {atoms[0]}" if len(atoms) == 1 else f"atoms {atoms[0]} to {atoms[-1]}"


def span(numbers: Sequence[int]) -> str:
    """Format as `4` or `4 to 9`."""
    return " to ".join(dict.fromkeys((str(numbers[0]), str(numbers[-1]))))


def from_to(values: Sequence[float]) -> str:
    """Format the first and the last value, or the only one; `-` without values."""
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in (values[0], values[-1]))) if values else "-"
