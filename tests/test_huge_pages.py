"""Memory on large pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from ember import huge_pages
from ember.huge_pages import LARGE, zeros


@pytest.mark.parametrize("size", [7, LARGE // 4, LARGE + 12])
def test_all_is_zero_and_can_be_written(size):
    """Tensors of all sizes, whatever memory they lie in."""
    x = zeros((size, 1), torch.float32)
    assert x.shape == (size, 1) and not x.any()
    x += 1
    assert x.sum() == size


def test_a_kernel_without_large_pages(monkeypatch):
    """Such a kernel refuses the advice; no model could be loaded there."""
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", 9999)
    with pytest.raises(OSError):
        mmap.mmap(-1, 4096).madvise(9999)
    assert not zeros((LARGE,), torch.uint8).any()
