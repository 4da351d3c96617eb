"""What the machine gives and gets back."""

from __future__ import annotations

import ctypes

import pytest
import torch

from h2o_flexgen.engine import machine


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_memory_below_memory_in_use_goes_back_to_the_system() -> None:
    small = [torch.ones(32 << 8) for _ in range(2000)]  # 32 KiB each: from the heap, not pages of their own
    last = torch.ones(32 << 8)
    full = machine.rss()
    small.clear()
    machine.return_free_pages()
    assert machine.rss() < full - (40 << 20)
    assert last.sum() == 32 << 8


def test_a_library_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_malloc_trim", lambda: None)
    machine.return_free_pages()
