"""Files of pages: tensors come back as they lay in memory, and what cannot is an error."""

from pathlib import Path

import pytest
import torch

from piecework.training.pages import PageFiles, packed


def test_tensors_come_back_as_they_lay_in_memory(tmp_path: Path) -> None:
    """In whatever format and type, in one page; and so does what replaces it, which is shorter."""
    torch.manual_seed(0)
    maps = torch.randn(2, 3, 4, 5)
    kept = [
        maps.contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.tensor(3.5),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.arange(256, dtype=torch.uint8),
        torch.nn.Parameter(torch.randn(3)),
    ]
    pages = PageFiles(tmp_path / "pages")
    assert not pages.holds("a")
    pages.write("a", kept)
    size = 4 * 120 + 4 * 24 + 4 + 8 + 0 + 2 * 5 + 256 + 4 * 3
    assert pages.moved == (0, size, 1)
    assert (tmp_path / "pages" / "a.page").stat().st_size == size
    found = [torch.zeros_like(each) for each in kept]
    assert found[0].stride() == kept[0].stride() != maps.stride()
    pages.read("a", found)
    assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))
    assert pages.moved == (size, size, 2)
    pages.write("a", kept[2:3])
    pages.read("a", found[2:3])
    assert (tmp_path / "pages" / "a.page").stat().st_size == 4


def test_a_tensor_with_gaps_has_no_page(tmp_path: Path) -> None:
    pages, every_second = PageFiles(tmp_path), torch.arange(8.0)[::2]
    with pytest.raises(ValueError, match=r"shape \(4,\) and strides \(2,\) has gaps: it has no page"):
        pages.write("a", [every_second])
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and strides \(0, 1\) has gaps"):
        pages.write("a", [torch.ones(3).expand(2, 3)])
    pages.write("a", [packed(every_second)])
    pages.read("a", [found := torch.empty(4)])
    assert torch.equal(found, every_second)
    dense = torch.randn(2, 3).t()
    assert packed(dense) is dense


def test_what_is_not_there_is_an_error_that_names_the_page(tmp_path: Path) -> None:
    pages = PageFiles(tmp_path)
    pages.write("atoms.1", [torch.ones(3)])
    with pytest.raises(OSError, match=r"page atoms\.1 is 8 bytes too short"):
        pages.read("atoms.1", [torch.ones(2), torch.ones(3)])
    with pytest.raises(FileNotFoundError, match=r"atoms\.2\.page"):
        pages.read("atoms.2", [torch.ones(3)])
