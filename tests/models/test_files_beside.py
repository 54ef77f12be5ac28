"""A model's file imports those beside it, unless Python would find another file of that name."""

import sys
from pathlib import Path

import pytest

from piecework.models.imported.source import find_make

MAKES = "def net(num_classes, input_shape): return {!r}\n"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, **files: str) -> str:
    """Write files that each import what is given for them, the last one a function; return the name of the first one's."""
    for name, imported in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from {imported} import net\n" if imported else MAKES.format(folder.name), "utf-8")
    return f"{folder / next(iter(files))}.py:net"


def test_a_users_file_imports_those_beside_it(tmp_path: Path) -> None:
    """And these import others. A folder of a package's name may hold something else."""
    name = write(
        tmp_path / "one", mine="beside_a", beside_a="beside_kit.parts", beside_kit__parts="beside_b", beside_b=""
    )
    write(tmp_path / "one", json__figures__draw="")
    (tmp_path / "one" / "beside_a.py").write_text("import json\nfrom beside_kit.parts import net\n", "utf-8")
    made: object = find_make(name)(3, (4,))
    assert made == "one"
    assert sys.path[-1] == str(tmp_path / "one")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"mine": "near", "near": ""}, r"mine\.py imports 'near', which is .*one/near\.py here, not .*two/near\.py"),
        (
            {"mine": "json", "json": ""},
            r"mine\.py imports 'json', which is .*json/__init__\.py here, not .*two/json\.py",
        ),
        ({"mine": "sys", "sys": ""}, r"mine\.py imports 'sys', which is built-in here, not .*two/sys\.py"),
        (
            {"mine": "nearer", "nearer": "near", "near": ""},
            r"nearer\.py imports 'near', which is .*one/near\.py here, not .*two/near\.py",
        ),
        ({"mine": "kit.near", "kit__near": ""}, r"mine\.py imports 'kit', which is .*one/kit here, not .*two/kit"),
    ],
)
def test_files_beside_that_python_would_not_find_are_refused(
    files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one beside it imports them, or where they are in a folder without __init__.py."""
    monkeypatch.syspath_prepend(tmp_path / "one")
    write(tmp_path / "one", near="", kit__near="")
    name = write(tmp_path / "two", **files)
    with pytest.raises(ValueError, match=rf"mine\.py' cannot be imported: ImportError: {said}: rename the latter"):
        find_make(name)
