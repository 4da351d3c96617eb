"""Numbers kept in four or eight bits each, with a scale and a lowest value per group of neighbours."""

from h2o_flexgen.kernels.packed import PackedWeight, Weight
from h2o_flexgen.kernels.types import Quantised
from h2o_flexgen.quant.groupwise import dequantise, quantise

__all__ = ["PackedWeight", "Quantised", "Weight", "dequantise", "quantise"]
