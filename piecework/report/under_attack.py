"""The report's sections of adversarial training: the trained model under attack, and robustness over the rounds."""

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from piecework.device_profiles.profile import format_percent
from piecework.models.model_file import description
from piecework.report.display import Record
from piecework.report.page import (
    Section,
    graph_objects,
    line,
    mark_stages,
    over_rounds,
    subplots,
    table,
)
from piecework.strategies.panels import atom_range

ATTACKS = {"apgd-ce": "APGD-CE", "apgd-t": "APGD-T", "fab-t": "FAB-T", "square": "Square"}
CLEAN_AND_ATTACKED = (
    ("on the test data", "accuracy", "adversarial_accuracy"),
    ("on the clients' validation data", "client_accuracy", "client_adversarial_accuracy"),
)


def is_adversarial(rounds: Sequence[Record]) -> bool:
    """Return whether anything was evaluated under attack."""
    return any(r.get(key) is not None for r in rounds for _, _, key in CLEAN_AND_ATTACKED)


def final_section(final: Record, settings: Record, path: Path) -> Section:
    """Return the section of the trained model, clean and under each attack."""
    rows = [("none", "all test images", format_percent(final["accuracy"]))]
    if final["adversarial_accuracy"] is not None:
        rows.append(
            (f"PGD-{final['attack_steps']}", str(final["attacked"]), format_percent(final["adversarial_accuracy"]))
        )
    below = ""
    if found := final.get("autoattack"):
        images = str(found["images"])
        rows.append(("none, the images of AutoAttack", images, format_percent(found["clean_accuracy"])))
        names = [ATTACKS.get(name, name) for name in found["after"]]
        for i, accuracy in enumerate(found["after"].values(), start=1):
            so_far = " + ".join(names[:i])
            rows.append((f"AutoAttack: {so_far}" if i == len(names) else so_far, images, format_percent(accuracy)))
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
    steps, images = settings["evaluation.attack-steps"], settings["evaluation.attack-examples"]
    of_modules = (
        " Of the modules up to the one in training, with its head; dashed: one module was fixed, the next began."
        if any(r.get("modules", 1) > 1 for r in rounds)
        else ""
    )
    clean = "in warm-up rounds"
    if any("adversarial_clients" in record for record in rounds):
        clean += ", and of clients without memory for an attack"
    trained = f"Test loss: clean. Training loss: mean of the clients, of adversarial examples (clean ones {clean})"
    return [
        Section(
            "Accuracy, clean and under attack",
            f"Test data: all images, attacked at most {images}. Validation data: what clients held back." + of_modules,
            partial(draw_accuracies, rounds, steps),
        ),
        Section("Loss", f"{trained}.", partial(draw_losses, rounds)),
    ]


def draw_accuracies(rounds: Sequence[Record], steps: int) -> Any:
    """Draw clean and adversarial accuracy, on the test data and on the clients' data below each other."""
    shown = [p for p in CLEAN_AND_ATTACKED if any(r.get(key) is not None for r in rounds for key in p[1:])]
    figure = subplots(len(shown), subplot_titles=[title for title, _, _ in shown])
    for panel, (_, *keys) in enumerate(shown, start=1):
        for i, (key, name) in enumerate(zip(keys, ("clean", f"under PGD-{steps}"), strict=True)):
            if points := [(r["round"], r[key]) for r in rounds if r.get(key) is not None]:
                first = not any(trace.name == name for trace in figure.data)
                trace = line(points, name, (2, 4)[i]).update(legendgroup=name, showlegend=first)
                figure.add_trace(trace, row=panel, col=1)
    figure.update_yaxes(title="accuracy", tickformat="~%", rangemode="tozero")
    return mark_stages(over_rounds(figure, rounds), rounds)


def draw_losses(rounds: Sequence[Record]) -> Any:
    """Draw the clean test loss and the clients' training loss."""
    figure = graph_objects().Figure()
    for i, (key, name) in enumerate((("loss", "test loss"), ("train_loss", "training loss"))):
        if points := [(r["round"], r[key]) for r in rounds if r[key] is not None]:
            figure.add_trace(line(points, name, i))
    figure.update_yaxes(title="loss", rangemode="tozero")
    return mark_stages(over_rounds(figure, rounds), rounds)
