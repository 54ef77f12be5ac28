"""The ClientApp, as Flower finds it (`clientapp` in pyproject.toml)."""

import piecework  # noqa: F401  (waits where another thread imports the package, and has not completed its path yet)
from piecework.client_app.app import app

__all__ = ["app"]
