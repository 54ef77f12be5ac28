"""The folders of the repository: what each may import, and that a checkout's packages hide behind one name."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median

import pytest

import piecework
from benchmarks.house import FOLDERS, files_of, imported
from piecework.training.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_runs_upwards(folder: str) -> None:
    files, allowed = files_of(folder), FOLDERS[: FOLDERS.index(folder) + 1]
    assert len(files) >= 5
    upwards = [(str(path.relative_to(ROOT)), name) for path in files for name in imported(path) if name not in allowed]
    assert upwards == []


def test_no_imports_run_in_a_circle() -> None:
    """Between files, also those inside of functions; what only type checkers import is not looked at."""
    names = {}
    for path in (path for folder in FOLDERS for path in files_of(folder)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "piecework" else ("piecework", *parts))
        names[name.removesuffix(".__init__")] = path
    graph = {
        name: {found for found in modules(path, names) if found != name and found in names}
        for name, path in names.items()
    }
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def modules(file: Path, known: Collection[str]) -> Iterator[str]:
    """The modules that a file imports: a name that is a module itself, else the module that has it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for block in [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]:
        block.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield whole if (whole := f"{node.module}.{alias.name}") in known else node.module


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_names_the_package(folder: str) -> None:
    """`import models` would work in a checkout, and find a second copy of each module, or a user's own."""
    found = set()
    for path in files_of(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    assert not found & set(FOLDERS[:-1])


@pytest.mark.parametrize("folder", FOLDERS[:-1])
def test_type_checkers_find_each_folder_by_a_link(folder: str) -> None:
    assert (ROOT / "piecework" / folder).resolve() == ROOT / folder
    assert len((ROOT / folder / "__init__.py").read_text(encoding="utf-8").splitlines()) >= 2, "says what lives there"


@pytest.mark.slow
def test_modules_of_a_user_with_our_names_are_left_alone(tmp_path: Path) -> None:
    for name in FOLDERS[:-1]:
        (tmp_path / f"{name}.py").write_text(
            "raise AssertionError('this is the user's own')\n".replace("'s own", " own")
        )
    words = "import piecework, piecework.cli, piecework.server_app.rounds, piecework.client_app.app as app; print(app.__file__)"
    done = subprocess.run([sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == ROOT / "client_app" / "app.py"


def test_files_are_short() -> None:
    lines = {
        str(path): len(path.read_text(encoding="utf-8").splitlines())
        for folder in (*FOLDERS, "benchmarks")
        for path in files_of(folder)
    }
    assert median(lines.values()) <= 120
    assert {path: count for path, count in lines.items() if count > 350} == {}


@pytest.mark.parametrize("folder", [*FOLDERS, "benchmarks"])
def test_functions_and_classes_can_be_seen_at_once(folder: str) -> None:
    """No function above 50 lines, no class above 25 public methods."""
    for path in files_of(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 50, f"{path}: {node.name}"
            elif isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
                assert len(methods) <= 25, f"{path}: {node.name}"


NEUTRAL = ("device_profiles", "federated_data", "federation", "server_app", "client_app", "piecework")


def test_neutral_code_names_no_method() -> None:
    """Nor does a comment; `local` is also a word. The app that `piecework new` writes is a user's, and has a method."""
    names = re.compile(rf"(?<![\w-])({'|'.join(METHODS.keys() - {'local'})})(?![\w-])")
    files = [path for folder in NEUTRAL for path in files_of(folder) if "new_app" not in path.parts]
    found = {str(path.relative_to(ROOT)) for path in files if names.search(path.read_text(encoding="utf-8"))}
    assert found == set()


@pytest.mark.slow
def test_a_board_loads_nothing_of_the_server() -> None:
    """Each method's client alone, with what clients share."""
    code = (
        "import sys; from importlib import import_module; from piecework.training.methods import METHODS;"
        "[import_module(entry.client) for entry in METHODS.values()];"
        "own = [name for name in sys.modules if name.startswith('piecework.')];"
        "print(sorted(name for name in own if name.split('.')[1] in ('server_app', 'federation')"
        " or (name.startswith('piecework.strategies.') and name.endswith(('.server', '.method', '.cut')))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_checkout_has_no_other_folder_in_piecework() -> None:
    others = ("tests", "conf", "benchmarks", "docs", "piecework", "numpy")
    assert [name for name in others if find_spec(f"piecework.{name}") is not None] == []


def test_without_links_the_packages_are_found_beside_the_folder(tmp_path: Path) -> None:
    """As in the bundle that Flower makes of a checkout, which has none."""
    copy = tmp_path / "bundle" / "piecework" / "__init__.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(piecework.__file__, copy)
    spec = spec_from_file_location("bundled", copy, submodule_search_locations=[str(copy.parent)])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(module.__path__) == [str(copy.parent), str(tmp_path / "bundle")]
