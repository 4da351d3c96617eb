"""The policy that knows the attention to come: what it knows, beside transformers, and what it does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_flexgen.cache.eviction.ceiling import CEILING, CeilingPolicy, Foresight
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.splits import SPLITS
from h2o_flexgen.evaluation.suites.tasks import ceiling
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.planning.llm import LLM
from tests.cache.harness import held_counts
from tests.tiny import make_model, prompts_of, save


def test_it_knows_the_attention_of_the_full_run(tmp_path: Path) -> None:
    model = make_model("gemma3")
    pairs = [(ids[:16], ids[16:]) for ids in prompts_of([21, 24])]
    folder = str(save(model, tmp_path / "model"))
    with (
        ceiling() as foresight,
        LLM(folder, dtype="float32", eviction=EvictionConfig(CEILING, budget=4)) as llm,
        foresight.watching([len(rest) - 1 for _, rest in pairs]),
    ):
        llm.score([(context + rest[:-1], rest[-1:]) for context, rest in pairs])
    model.set_attn_implementation("eager")
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    for row, (context, rest) in enumerate(pairs):
        with torch.no_grad():
            rows = model(torch.tensor([context + rest[:-1]]), output_attentions=True).attentions
        for layer, attention in enumerate(rows):
            mean = attention[0].unflatten(0, (-1, heads)).mean(1)
            for query in range(len(rest)):
                expected = mean[:, len(context) + query :].sum(1)
                torch.testing.assert_close(foresight.to_come[layer, row][:, query], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 9])
def test_what_goes_is_what_is_looked_at_least_from_then_on(window: int | None) -> None:
    heads, size, prompt, steps, seed = 2, 4, 14, 8, 0
    foresight, generator = Foresight(), torch.Generator().manual_seed(seed)
    received = torch.rand(heads, steps, prompt + steps, generator=generator)
    foresight.record(0, 5, received)
    budget = EvictionConfig("tova", budget=6).resolve(prompt, steps)
    cache = KVCache(
        CacheShape.of([budget], heads, size), [budget], CeilingPolicy(foresight), layer=0, row_ids=[5], window=window
    )
    cache.attach(*CacheShape.of([budget], heads, size).buffers(torch.float32))
    ranks = torch.stack([received.sum(1)])[..., :prompt]
    cache.fill([0], *torch.rand(2, 1, heads, prompt, size, generator=generator), ranks)
    for head in range(heads):
        kept = _best(received[head].sum(0), list(range(prompt)), 6, prompt, window)
        assert cache.kept(0, head) == kept
    held = [cache.kept(0, head) for head in range(heads)]
    for step in range(steps):
        cache.attend(*torch.rand(3, 1, heads, size, generator=generator), logits=Logits(0.5))
        for head in range(heads):
            to_come = received[head, step + 1 :].sum(0)
            held[head] = _best(to_come, [*held[head], prompt + step], 6, prompt + step + 1, window)
            assert cache.kept(0, head) == held[head]


def _best(to_come: torch.Tensor, positions: list[int], count: int, now: int, window: int | None) -> list[int]:
    """Of `positions` the `count` best for the query at `now`; what it does not see is worst, the oldest first."""
    seen = {p: window is None or p > now - window for p in positions}
    ranked = sorted(positions, key=lambda p: (seen[p], float(to_come[p]) if seen[p] else p, -p), reverse=True)
    return sorted(ranked[:count])


def test_rows_that_keep_everything_were_not_watched() -> None:
    foresight, (few, full) = Foresight(), [EvictionConfig("tova", budget=b).resolve(4, 4) for b in (5, 8)]
    foresight.record(0, 0, torch.rand(1, 3, 7))
    shape = CacheShape.of([few, full], 1, 4)
    cache = KVCache(shape, [few, full], CeilingPolicy(foresight), layer=0, row_ids=[0, 1])
    cache.attach(*shape.buffers(torch.float32))
    cache.fill([0, 1], *torch.rand(2, 2, 1, 4, 4), torch.zeros(2, 1, 4))
    for _ in range(3):
        cache.attend(*torch.rand(3, 2, 1, 4), logits=Logits(0.5))
    assert (held_counts(cache), cache.kept(1, 0)) == ([5, 7], list(range(7)))


def test_it_is_there_for_measurements_alone() -> None:
    with ceiling():
        assert CEILING in SPLITS
    assert CEILING not in SPLITS
