"""What tests of the decoder share: no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def no_gradients() -> Any:
    with torch.inference_mode():
        yield
