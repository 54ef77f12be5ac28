"""Files that commands read beside the folder of a run that is resumed: data sets, traces, fleets, presets, models, records."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.children import Ended, end_of, start
from benchmarks.chaos.systems import dataset_in, results, settings_of, words_for
from piecework.device_profiles.fleet_file import SHIPPED

Made = tuple[Path, list[str], dict[str, str]]  # the file, the command, and its environment
FEDAVG = {"num-rounds": 1, "clients": 2, "clients-per-round": 0}


@dataclass(frozen=True)
class Read:
    """A kind of file and a command that reads it.

    `make` makes the file in a folder, unless it is there. `result` is what the command came to. The file is the user's `own` if
    nobody else can know what it should hold.
    """

    kind: str
    make: Callable[[Path], Made]
    result: Callable[[Path, Ended], str]
    own: bool = False


def said(place: Path, ended: Ended) -> str:
    """Return what was printed, but for warnings of damage."""
    return "\n".join(line for line in ended.said.splitlines() if "damaged" not in line)


def trained(place: Path, ended: Ended) -> str:
    """Return the results of the run in a folder."""
    return json.dumps(results(place / "run", ()))


def written(place: Path, ended: Ended) -> str:
    """Return the files that a command wrote."""
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted((place / "written").iterdir()))


def reported(place: Path, ended: Ended) -> str:
    """Return the page about the run in a folder."""
    return (place / "finished" / "report.html").read_text("utf-8")


def a_run(place: Path, **changes: object) -> list[str]:
    """Return the command of a short run on a data set in a folder."""
    return words_for(settings_of("fedavg", "local", dataset_in(place)) | FEDAVG | changes, place, "run")


def own_cache(place: Path) -> dict[str, str]:
    """Return the environment with a cache of its own."""
    return {"PIECEWORK_CACHE": str(place / "cache")}


def dataset(place: Path) -> Made:
    """A user's file of arrays. It has been converted before, as it was then."""
    return dataset_in(place), a_run(place), own_cache(place)


def prepared(name: str) -> Callable[[Path], Made]:
    """Return what makes a file of a converted data set."""

    def make(place: Path) -> Made:
        words = a_run(place)
        if not (found := list(place.glob(f"cache/npz-*/{name}"))):
            require(place, words, own_cache(place))
            found = list(place.glob(f"cache/npz-*/{name}"))
        return found[0], words, own_cache(place)

    return make


def traces(place: Path) -> Made:
    """The kept traces, of a plan."""
    words, file = ["plan", f"--set=dataset=npz:{dataset_in(place)}"], place / "cache" / "traces" / "traces.sqlite"
    if not file.is_file():
        require(place, words, own_cache(place))
    return file, words, own_cache(place)


def fleet(place: Path) -> Made:
    """The file of a fleet."""
    file = place / "fleet.toml"
    if not file.is_file():
        shutil.copyfile(SHIPPED / "demo.toml", file)
    return file, ["plan", f"--set=fleet={file}"], {}


def preset(place: Path) -> Made:
    """The file of a preset."""
    file = place / "preset.toml"
    if not file.is_file():
        file.write_text('strategy = "fedepth"\nmodel = "convnet"\n[training]\nlr = 0.05\nbatch-size = 16\n')
    return file, ["plan", f"--preset={file}"], {}


def initial_weights(place: Path) -> Made:
    """A trained model from which another run begins."""
    file = place / "weights.safetensors"
    if not file.is_file():
        require(place, a_run(place), {})
        shutil.copyfile(place / "run" / "model.safetensors", file)
    return file, a_run(place, **{"training.init-weights": file}), {}


def of_a_run(name: str, *words: str) -> Callable[[Path], Made]:
    """Return what makes a run whose folder has a file, for a command that reads it; `RUN` is the folder."""

    def make(place: Path) -> Made:
        folder = place / "finished"
        if not folder.is_dir():
            require(place, a_run(place), {})
            (place / "run").rename(folder)
        into = {"RUN": str(folder), "OUT": str(place / "written")}
        return folder / name, [into.get(word, word) for word in words], {}

    return make


def require(place: Path, words: list[str], environment: dict[str, str]) -> None:
    """Run a command that must succeed. Raises SystemExit."""
    shutil.rmtree(place / "run", ignore_errors=True)
    ended = end_of(start(words, place / "made.txt", environment))
    assert ended is not None
    if ended.code:
        raise SystemExit(f"{' '.join(words)} ended with exit code {ended.code}:\n{ended.said}")


READS = [
    Read("data set of one's own (.npz)", dataset, trained),
    Read("converted data set: examples", prepared("train-images.npy"), trained),
    Read("converted data set: labels", prepared("train-labels.npy"), trained),
    Read("converted data set: meta.json", prepared("meta.json"), trained),
    Read("kept traces", traces, said),
    Read("fleet", fleet, said, own=True),
    Read("preset", preset, said, own=True),
    Read("initial weights", initial_weights, trained, own=True),
    Read("trained model", of_a_run("model.safetensors", "evaluate", "RUN", "--json"), said),
    Read("records, exported", of_a_run("rounds.jsonl", "export", "RUN", "--format=csv", "--out", "OUT"), written),
    Read("summary.json, compared", of_a_run("summary.json", "compare", "RUN"), said),
    Read("settings.toml, compared", of_a_run("settings.toml", "compare", "RUN"), said),
    Read("coverage.json, in a report", of_a_run("coverage.json", "report", "RUN", "--without-plotly"), reported),
    Read("summary.json, in a report", of_a_run("summary.json", "report", "RUN", "--without-plotly"), reported),
]
