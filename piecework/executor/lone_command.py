"""Flower's commands, each without the others of its package."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import flwr


def lone_command(package: str, name: str) -> Any:
    """Import a command of Flower without the others of its package, which bring a database and a web server: 36 MB."""
    known = f"piecework-{name}"
    if known not in sys.modules:
        path = Path(flwr.__file__).parent / package / "cli" / f"{name}.py"
        spec = spec_from_file_location(known, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]
