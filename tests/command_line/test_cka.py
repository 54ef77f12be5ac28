"""`python -m benchmarks.cka`: linear CKA by hand-computed numbers, and two runs beside each other."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import TRIO, run_local
from torch import Tensor

from benchmarks import cka


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def test_linear_cka_by_hand() -> None:
    """Of single columns it is the squared correlation: (x y)^2 / (x x) (y y) of centred columns."""
    x = column(1, 0, -1)
    assert cka.linear_cka(x, column(1, 1, -2)) == pytest.approx(9 / 12)
    assert cka.linear_cka(x, column(1, -2, 1)) == pytest.approx(0)
    assert cka.linear_cka(column(5, 4, 3), column(-1, -3, -5)) == pytest.approx(1)  # moved, scaled and turned round
    # Two columns: X'X = [[2, 1], [1, 2]] has the norm sqrt(10), y'y = 2, and Y'X = (2, 1).
    both = torch.cat([x, column(0, 1, -1)], dim=1)
    assert cka.linear_cka(both, x) == pytest.approx(5 / (10**0.5 * 2))
    assert cka.linear_cka(x, column(7, 7, 7)) == 0


def test_it_does_not_see_rotations() -> None:
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    turned = x @ torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(2)))[0]
    assert cka.linear_cka(x, 3 * turned + 1) == pytest.approx(1)


def test_two_runs_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_local(tmp_path / str(seed), strategy="fedavg", num_rounds=1, seed=seed, **TRIO).path for seed in (1, 2)]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cka", *words, "--examples", "60"])
        cka.main()
        return capsys.readouterr().out

    same = json.loads(said(str(runs[0]), str(runs[0]), "--json"))
    assert same == pytest.approx([1.0] * len(same))
    other = json.loads(said(str(runs[0]), str(runs[1]), "--json"))
    assert len(other) == len(same)
    assert all(0 < value < 1 for value in other)
    assert "logits" in said(str(runs[0]), str(runs[1]))
    raw = run_local(tmp_path / "raw", strategy="fedavg", num_rounds=1, data__pixel_scale="raw", **TRIO).path
    with pytest.raises(SystemExit):
        said(str(runs[0]), str(raw))
    assert "data.pixel-scale is 'normalised' in the first run and 'raw' in the second" in capsys.readouterr().err
