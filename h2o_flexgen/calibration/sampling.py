"""What choosing tokens costs: the engine's sampler on rows that never end."""

from __future__ import annotations

from dataclasses import replace

import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.reader import RequestReader
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler

_PROMPT = 4
_ROWS = 64
_NARROW = 64  # a vocabulary that takes no time
_LEAST = 1e-7


@torch.inference_mode()
def sample_seconds(bench: Bench, seconds: float, elementwise: float) -> float:
    """Of choosing one row's token greedily, `sample_s` of ComputeRates.

    elementwise: bytes per second; looking once through a row's logits at that rate is no part of it.
    """
    one, many = (_choosing(bench, _NARROW, rows, seconds * 0.2) for rows in (1, _ROWS))
    wide = _choosing(bench, bench.spec.vocab_size, _ROWS, seconds * 0.6) / _ROWS
    looked_through = 4 * bench.spec.vocab_size / elementwise
    return max(_LEAST, (many - one) / (_ROWS - 1), wide - looked_through)


def greedy_sequences(spec: ModelSpec, eviction: EvictionConfig, rows: int, lengths: tuple[int, int]) -> list[Sequence]:
    """Rows that no token ends; `lengths`: tokens of the prompt, all alike, and new ones."""
    prompt, new = lengths
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return RequestReader(spec, eviction, None, 0).read([[0] * prompt] * rows, params)


def _choosing(bench: Bench, vocabulary: int, rows: int, seconds: float) -> float:
    """Seconds of the sampler's step over so many rows that are never done."""
    spec = replace(bench.spec, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=None)
    sequences = greedy_sequences(replace(spec, max_positions=1 << 40), EvictionConfig(), rows, (_PROMPT, 1 << 30))
    logits = bench.noise(rows, vocabulary).float()
    sampler = Sampler()
    sample = bench.timer.measure(lambda: sampler.step(sequences, logits), seconds)
    return bench.spreads.note(f"{bench.name} sampling", sample).seconds
