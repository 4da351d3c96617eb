"""The solver that HiGHS is compared with."""

from __future__ import annotations

import pulp
import pytest

from h2o_flexgen.cost.lp import _solver
from h2o_flexgen.errors import UsageError


def _has_cbc() -> bool:
    """PuLP 3 brings it along, PuLP 4 does not."""
    try:
        return bool(_solver(pulp, "cbc"))
    except UsageError:
        return False


OTHER = "cbc" if _has_cbc() else "highs"
needs_cbc = pytest.mark.skipif(OTHER != "cbc", reason="no CBC here: pip install 'pulp[cbc]'")
