"""h2o_flexgen: offline, throughput-oriented inference of language models that do not fit."""
