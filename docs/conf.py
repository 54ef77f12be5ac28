"""The site of the documents: `make docs` builds it into docs/_build, and fails for a warning. Build it from the
repository, where `benchmarks` is found.

The pages of the systems, and the lists of commands and settings, are written from the program before the site is built.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes

import piecework
from benchmarks.docs import RECORDS, beside
from benchmarks.site import write_pages

write_pages(Path(__file__).resolve().parent)

project = "Piecework"
author = "The Piecework developers"
project_copyright = author
version = release = piecework.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|pandas|numpy|collections|pathlib)\..*"),  # not of this site
    (
        "py:.*",
        r"piecework\.[a-z].*|TrainedModel|Scores|Exported|StudyStatus|Table|Group",
    ),  # annotations, by their short names
]
highlight_language = "none"  # of blocks of commands

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"

smartquotes = False  # they make one dash of the two before an option

html_theme = "furo"
html_title = "Piecework"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}


def add_last_runs(_: Any, document: nodes.document) -> None:
    """Add a sentence below each block of commands that take long: when they were last run."""
    records = json.loads(RECORDS.read_text("utf-8"))
    for block in list(document.findall(nodes.literal_block)):
        if said := beside(block.astext(), records):
            block.parent.insert(block.parent.index(block) + 1, nodes.paragraph("", "", nodes.emphasis("", said)))


def setup(app: Any) -> None:
    """Register what Sphinx calls."""
    app.connect("doctree-read", add_last_runs)
