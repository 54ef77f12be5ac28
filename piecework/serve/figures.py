"""The curves of a run as plotly's figures in JSON: the same as in its report, of the rounds so far."""

import json
from typing import Any

from piecework.report.page import LAYOUT, Section, height
from piecework.report.read_records import with_details
from piecework.report.run_page import draw_curves
from piecework.report.under_attack import is_adversarial, robust_curves
from piecework.serve.reading import ServedRun

Record = dict[str, Any]


def figures(run: ServedRun) -> list[Record]:
    """Return heading, caption, text alternative and figure of each picture. Raises CheckpointError, ReportError."""
    rounds = run.fold.rounds
    if not rounds:
        return []
    with with_details(run.run_dir):
        sections = (
            robust_curves(rounds, dict(run.settings))
            if is_adversarial(rounds)
            else [Section("Accuracy and loss", "", draw_curves(rounds))]
        )
    return [picture(section) for section in sections]


def picture(section: Section) -> Record:
    """Return a section as JSON values."""
    figure = section.figure
    figure.update_layout(LAYOUT, height=height(figure), uirevision="kept")  # what a reader zoomed into stays
    return {
        "heading": section.heading,
        "caption": section.caption,
        "alternative": alternative(figure),
        "figure": json.loads(figure.to_json()),
    }


def alternative(figure: Any) -> str:
    """Return a figure's curves in words: their first and last values, which may be all that a reader is told."""
    parts = []
    for trace in figure.data:
        values = [(x, y) for x, y in zip(trace.x, trace.y, strict=True) if y is not None]
        if values:
            (first, before), (last, after) = values[0], values[-1]
            parts.append(f"{trace.name}: {before:.4g} in round {first}, {after:.4g} in round {last}")
    return "; ".join(parts)
