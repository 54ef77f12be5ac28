"""The ServerApp, as Flower finds it (`serverapp` in pyproject.toml)."""

import piecework  # noqa: F401  (waits where another thread imports the package, and has not completed its path yet)
from piecework.server_app.app import app

__all__ = ["app"]
