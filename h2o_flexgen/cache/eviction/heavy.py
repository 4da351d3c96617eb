"""Heavy hitters alone: H2O without its recent half."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.h2o import H2OPolicy


class HeavyPolicy(H2OPolicy):
    """H2O's score with nothing protected (`recent` = 0): the newest token itself may go, once it was attended to."""

    name = "heavy"
