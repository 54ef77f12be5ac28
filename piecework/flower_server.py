"""The ServerApp, as Flower finds it (`serverapp` in pyproject.toml)."""

import piecework  # noqa: F401  (waits for another thread that is importing it, until its path is complete)
from piecework.server_app.app import app

__all__ = ["app"]
