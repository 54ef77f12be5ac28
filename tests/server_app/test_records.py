"""The folder of a run: checkpoints that survive, and files that were cut short, spoiled or written by somebody else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from helpers import numpy_of, same, tiny_settings
from safetensors import safe_open

from piecework.client_app import disk
from piecework.client_app.disk import StorageError, write_atomically
from piecework.client_app.seal import seal
from piecework.server_app.records import (
    CheckpointError,
    RunDir,
    read_arrays,
    read_checkpoint,
)


def arrays(value: float = 0.5) -> ArrayRecord:
    return ArrayRecord(
        {
            "atoms.0.w": Array(np.full((2, 3), value, dtype=np.float32)),
            "atoms.0.n": Array(np.array(7, dtype=np.int64)),
            "head.b": Array(np.array([np.nextafter(np.float32(value), np.float32(1))])),
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create(tiny_settings())
    return run


def save(run: RunDir, *rounds: int) -> None:
    for server_round in rounds:
        run.save_checkpoint(arrays(server_round), {"round": server_round})


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


# ---- checkpoints


def test_a_checkpoint_round_trips(run: RunDir) -> None:
    values = {
        "round": 3,
        "best": None,
        "settings": {"training.lr": 0.1},
        "strategy-state": {"norms": {"head": [0.1, 1e-17, 3.0]}},
    }
    run.save_checkpoint(arrays(0.1), values)
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values == values
    assert same(numpy_of(arrays(0.1)), numpy_of(checkpoint.arrays))
    assert numpy_of(checkpoint.arrays)["atoms.0.n"].shape == ()
    assert sorted(path.name for path in (run.checkpoints / "round-00003").iterdir()) == [
        "arrays.safetensors",
        "manifest.json",
        "state.json",
    ]


def test_no_checkpoint(run: RunDir) -> None:
    assert run.load_checkpoint() is None


def test_the_first_and_the_newest_two_are_kept(run: RunDir) -> None:
    save(run, 1, 2, 3)
    assert names(run) == ["round-00001", "round-00002", "round-00003"]
    save(run, 4, 5)
    assert names(run) == ["round-00001", "round-00004", "round-00005"]
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert numpy_of(checkpoint.arrays)["atoms.0.w"][0, 0] == 5


def test_checkpoints_are_in_the_order_of_their_rounds(run: RunDir) -> None:
    save(run, 1, 99_999, 100_000, 100_001)
    assert names(run) == ["round-00001", "round-100000", "round-100001"]
    assert run.checkpoint_paths()[-1].name == "round-100001"
    assert run.last_complete_round() == 100_001


def test_a_checkpoint_that_was_not_finished_is_none(run: RunDir) -> None:
    save(run, 1)
    half = run.checkpoints / "round-00002.tmp"
    half.mkdir()
    (half / "arrays.safetensors").write_bytes(b"half")
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values["round"] == 1
    save(run, 2)
    assert names(run) == ["round-00001", "round-00002"]


def test_a_round_saved_again_replaces_itself(run: RunDir) -> None:
    save(run, 2)
    run.save_checkpoint(arrays(9.0), {"round": 2, "again": True})
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.values == {"round": 2, "again": True}
    assert numpy_of(checkpoint.arrays)["atoms.0.w"][0, 0] == 9


def spoil_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def another_round(path: Path) -> None:
    """One bit, with which the file is as good as before."""
    path.write_text(path.read_text().replace('"round": 2', '"round": 3'))


def from_schema_2(path: Path) -> None:
    """What the version before wrote: no manifest."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    (path.parent / "manifest.json").unlink()


def broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def of_schema_4(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 4}))
    seal(path.parent)


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("arrays.safetensors", spoil_bit, "is damaged: arrays.safetensors does not match its checksum"),
        ("arrays.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-5]), "arrays.safetensors does not match its"),
        ("arrays.safetensors", Path.unlink, "is damaged: arrays.safetensors is missing"),
        ("kept.safetensors", Path.unlink, "is damaged: kept.safetensors is missing"),
        ("state.json", another_round, "is damaged: state.json does not match its checksum"),
        ("state.json", lambda p: p.write_bytes(b"\xff\xfe"), "is damaged: state.json does not match its checksum"),
        ("state.json", Path.unlink, "is damaged: state.json is missing"),
        ("manifest.json", Path.unlink, "is damaged: manifest.json cannot be read (FileNotFoundError)"),
        ("manifest.json", lambda p: p.write_text(p.read_text()[:40]), "manifest.json cannot be read (JSONDecodeError)"),
        *(
            ("manifest.json", lambda p, text=text: p.write_text(text), "manifest.json is not a JSON object")
            for text in ("[[1,2]]", '[["state.json","x"]]', "null", '"ab"')
        ),
        (
            "arrays.safetensors",
            broken_link,
            "is damaged: arrays.safetensors cannot be read (No such file or directory)",
        ),
        ("state.json", broken_link, "is damaged: state.json cannot be read (No such file or directory)"),
        (
            "state.json",
            from_schema_2,
            "was written by another version of Piecework (schema 2, this is 3): resume the run",
        ),
        (
            "state.json",
            of_schema_4,
            "was written by another version of Piecework (schema 4, this is 3): resume the run",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(run: RunDir, file: str, change: Any, reason: str) -> None:
    for server_round in (1, 2):
        run.save_checkpoint(arrays(server_round), {"round": server_round}, arrays(0.1))
    path = run.checkpoints / "round-00002"
    change(path / file)
    with pytest.raises(CheckpointError) as caught:
        run.load_checkpoint()
    assert str(caught.value).startswith(f"{path} ")
    assert reason in str(caught.value)
    assert read_checkpoint(run.checkpoints / "round-00001").values == {"round": 1}


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("arrays.safetensors", "no safetensors", "is damaged: arrays.safetensors is not a safetensors file"),
        ("state.json", "[1]", "state.json is damaged (TypeError"),
        ("state.json", "{}", "state.json is damaged (KeyError: 'schema')"),
    ],
)
def test_files_that_are_not_what_they_should_be_though_the_checksum_fits(
    run: RunDir, file: str, content: str, reason: str
) -> None:
    save(run, 1)
    path = run.checkpoints / "round-00001"
    (path / file).write_text(content)
    seal(path)
    with pytest.raises(CheckpointError) as caught:
        run.load_checkpoint()
    assert reason in str(caught.value)


# ---- round records


def test_round_records(run: RunDir) -> None:
    assert run.rounds() == []
    for server_round in (1, 2, 3):
        run.append_round({"round": server_round, "clients": []})
    lines = run.rounds_file.read_text().splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"round": 0, "clients": 0, "crc32": 0}.keys()] * 3
    assert run.rounds() == [{"round": r, "clients": []} for r in (1, 2, 3)]


def test_what_cannot_be_written_says_how_to_go_on_in_a_folder_with_a_space(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "all runs")
    run.rounds_file.mkdir(parents=True)
    with pytest.raises(StorageError, match=f"piecework run --set 'resume-from={run.path}'$"):
        run.append_round({"round": 1})


def test_a_figure_that_was_changed_on_the_disk_is_noticed(run: RunDir) -> None:
    """As by a damaged block, whose line may be JSON still. A line of an earlier version has no checksum."""
    run.rounds_file.write_bytes(b'{"round":1,"accuracy":0.5}\n')
    for server_round in (2, 3):
        run.append_round({"round": server_round, "accuracy": 0.75})
    assert [record["accuracy"] for record in run.rounds()] == [0.5, 0.75, 0.75]
    sound = run.rounds_file.read_bytes()
    run.rounds_file.write_bytes(sound.replace(b'3,"accuracy":0.75', b'3,"accuracy":0.95'))
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl, line 3, is damaged: it does not match its checksum"):
        run.rounds()
    run.forget_after(2)
    assert run.rounds_file.read_bytes().splitlines()[1] == sound.splitlines()[1]
    assert [record["accuracy"] for record in run.rounds()] == [0.5, 0.75]


def test_a_half_written_last_line_is_no_record(run: RunDir) -> None:
    run.append_round({"round": 1})
    with run.rounds_file.open("ab") as file:
        file.write(b'{"round":2,"acc')
    assert run.rounds() == [{"round": 1}]
    run.forget_after(1)
    run.append_round({"round": 2})
    assert run.rounds() == [{"round": 1}, {"round": 2}]


def test_forget_after(run: RunDir) -> None:
    for server_round in (1, 2, 3):
        run.append_round({"round": server_round, "x": "ü"})
    run.forget_after(2)
    assert run.rounds() == [{"round": 1, "x": "ü"}, {"round": 2, "x": "ü"}]
    run.forget_after(0)
    assert run.rounds() == []


def test_forget_takes_records_and_checkpoints(run: RunDir) -> None:
    run.append_round({"round": 1})
    save(run, 1)
    run.forget()
    assert run.rounds() == []
    assert run.load_checkpoint() is None
    run.forget()  # nothing there is fine


# ---- the rest of the folder


def test_settings_of_a_run(run: RunDir) -> None:
    assert run.settings() == tiny_settings().to_run_config()
    sound = (run.path / "settings.toml").read_text()
    for damaged in (sound.replace("lr = 0.05", "lr = 0.07"), sound[:-10], sound.replace("crc32", "crc23")):
        (run.path / "settings.toml").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"settings\.toml is damaged: it does not match the checksum"):
            run.settings()
    (run.path / "settings.toml").write_text(sound.partition("\n")[2])  # as an earlier version wrote it
    assert run.settings() == tiny_settings().to_run_config()
    (run.path / "settings.toml").write_text("")
    with pytest.raises(CheckpointError, match=r"settings\.toml is damaged: it is empty"):
        run.settings()
    (run.path / "settings.toml").write_text("lr = ")
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        run.settings()
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        RunDir(run.path / "nothing").settings()


def test_the_model_file(run: RunDir) -> None:
    run.save_model(arrays(), {"experiment-id": "e", "settings": {"training.lr": 0.1}})
    path = run.path / "model.safetensors"
    assert same(numpy_of(arrays()), numpy_of(read_arrays(path)))
    with safe_open(path, framework="np") as file:
        described = json.loads(file.metadata()["piecework"])
    assert len(described.pop("sha256")) == 64
    assert described == {"experiment-id": "e", "settings": {"training.lr": 0.1}}
    assert not (run.path / "model.tmp").exists()


def test_the_summary(run: RunDir) -> None:
    run.write_summary({"status": "failed", "reason": "ü"})
    assert run.summary() == {"status": "failed", "reason": "ü"}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", full)
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
