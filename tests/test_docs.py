"""The code of docs/extend.md, run block by block, ends in a run of a strategy, model and data set that are all new."""

import re
import sys
from pathlib import Path

import pytest
from helpers import run_local

from client_app.trainers import TRAINERS
from models.zoo import MODELS
from strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]


def test_add_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(
        r"```python\n# (\w+)\.py\n(.*?)```", (ROOT / "docs" / "extend.md").read_text("utf-8"), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["my_fedprox", "run_fedprox", "my_model", "my_data", "run_all"]
    scope: dict[str, object] = {}
    for name, code in blocks:
        Path(f"{name}.py").write_text(code, encoding="utf-8")
        exec(compile(code, f"{name}.py", "exec"), scope)
    settings = scope["settings"]
    assert isinstance(settings, dict)
    try:
        changes = {key.replace("-", "_"): value for key, value in settings.items()}
        run_dir = run_local(tmp_path, num_rounds=3, clients_per_round=4, local_epochs=3, batch_size=8, **changes)
    finally:
        for registry, added in ((TRAINERS, "fedprox"), (STRATEGIES, "fedprox"), (MODELS, "mlp")):
            registry.pop(added)
        sys.modules.pop("my_fedprox", None)
    last = run_dir.rounds()[-1]
    assert last["accuracy"] > 0.9
    assert all(client["measured_peak"] <= client["predicted_peak"] for client in last["clients"])
