"""The curves of a run as plotly's figures in JSON: the same as in its report, of the rounds so far."""

import json
from functools import partial
from typing import Any

from piecework.report.in_words import in_words
from piecework.report.page import Section, dress
from piecework.report.read_records import with_details
from piecework.report.run_figures import draw_curves
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
            else [Section("Accuracy and loss", "", partial(draw_curves, rounds))]
        )
        return [picture(section) for section in sections]


def picture(section: Section) -> Record:
    """Return a section as JSON values."""
    figure = section.drawn
    said = in_words(figure, section.heading)
    dress(figure, uirevision="kept")  # what a reader zoomed into stays
    return {
        "heading": section.heading,
        "caption": section.caption,
        "alternative": said,
        "figure": json.loads(figure.to_json()),
    }
