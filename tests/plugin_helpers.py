"""Packages with plugins, installed for the time of a test."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path

from piecework.device_profiles.plugins import forget_plugins


@contextmanager
def installed(folder: Path, package: str, points: Mapping[str, Mapping[str, str]], **modules: str) -> Iterator[None]:
    """Have Python find a package in a folder: the metadata that an installer writes, and modules by name.

    `points` are the entry points by kind (`methods`, ..) and name.
    """
    folder.mkdir(exist_ok=True)
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = folder / f"{package.replace('-', '_')}-0.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.3\n", encoding="utf-8")
    lines = [
        line
        for kind, named in points.items()
        for line in (f"[piecework.{kind}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    sys.path.insert(0, str(folder))
    invalidate_caches()
    forget_plugins()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget_plugins()
