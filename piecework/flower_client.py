"""The ClientApp, as Flower finds it (`clientapp` in pyproject.toml)."""

import piecework  # noqa: F401  (waits for another thread that is importing it, until its path is complete)
from piecework.client_app.app import app

__all__ = ["app"]
