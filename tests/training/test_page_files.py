"""Pages in files: what is written comes back in any memory format, and a shorter page leaves nothing of a longer one."""

from pathlib import Path

import pytest
import torch

from piecework.training.pages import PageFiles


def test_pages_come_back_and_are_overwritten_where_they_lie(tmp_path: Path) -> None:
    pages = PageFiles(tmp_path / "pages")
    maps = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    pages.write("unit", [maps, torch.tensor(7)])
    found = [torch.empty_like(maps), torch.tensor(0)]
    pages.read("unit", found)
    assert torch.equal(found[0], maps)
    assert (found[1], pages.moved) == (7, (488, 488, 2))

    (path,) = pages.folder.iterdir()
    before = path.stat().st_ino
    pages.write("unit", [torch.ones(3)])
    assert (path.stat().st_ino, path.read_bytes()) == (before, torch.ones(3).numpy().tobytes())
    with pytest.raises(OSError, match="page unit is 4 bytes too short"):
        pages.read("unit", [torch.empty(4)])
