"""What tests of models by name share: the commit that a hub has, and names not found."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def not_found(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(*arguments, **options)
    assert caught.value.exit_code == 4
    return str(caught.value)
