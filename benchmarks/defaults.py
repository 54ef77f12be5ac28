"""Write the default of every setting into `[tool.flwr.app.config]` of pyproject.toml, where Flower looks for them.

    python -m benchmarks.defaults

Defaults are declared in training/settings. Flower refuses keys that are not in that table, so a new setting has to be there
too.
"""

import re
from pathlib import Path

import tomli_w

from piecework.training.settings import Settings
from piecework.training.settings.table import nest

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
CONFIG = re.compile(r"^\[tool\.flwr\.app\.config\]\n.*?(?=^\[(?!tool\.flwr\.app\.config))", re.MULTILINE | re.DOTALL)


def with_defaults(text: str) -> str:
    """Return the text of a pyproject.toml with the declared defaults in it."""
    tables = {"tool": {"flwr": {"app": {"config": nest(Settings().to_run_config())}}}}
    return CONFIG.sub(lambda _: f"{tomli_w.dumps(tables)}\n", text)


if __name__ == "__main__":
    found = PYPROJECT.read_text(encoding="utf-8")
    if (written := with_defaults(found)) != found:  # a newer file would be installed again
        PYPROJECT.write_text(written, encoding="utf-8")
