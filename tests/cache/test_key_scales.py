"""Scales of keys by channel."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.cache.packing import KeyScales, mean_of, scales_of
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.errors import UsageError
from tests.oracles.packed import channel_scales
from tests.seeds import torch_generator


def _looked_at(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (2, 4, 90, 6) and keys (2, 2, 90, 6) whose channels differ widely."""
    wide = torch.tensor([0.01, 0.1, 1.0, 3.0, 5.0, 90.0])
    queries, keys = (torch.randn(2, heads, 90, 6, generator=generator) for heads in (4, 2))
    return queries * wide.flip(0), keys * wide


def test_scales_equal_the_loop_and_change_no_score() -> None:
    queries, keys = _looked_at(torch_generator(3))
    scales = KeyScales(3, centred=False)
    scales.settle([2, 0], queries, keys, keys.device)
    for row, place in enumerate((2, 0)):
        for head in range(2):
            asked = queries[row, 2 * head : 2 * head + 2].transpose(0, 1)[-64:].tolist()
            assert scales.of[place, head].tolist() == channel_scales(asked, keys[row, head, -64:].tolist())
    kept, asked = scales.kept(keys, torch.tensor([2, 0])), torch.randn(3, 4, 6, generator=torch_generator(4))
    assert torch.equal(scales.seen(torch.stack([kept[1], kept[0], kept[0]]))[[2, 0]], keys)
    one, found = asked.view(3, 2, 2, 6)[2], scales.asked(asked).view(3, 2, 2, 6)[2]
    before, after = ((q.double() @ k.double().transpose(-1, -2)) for q, k in ((one, keys[0]), (found, kept[0])))
    assert torch.equal(before, after)  # powers of two round nothing
    assert torch.equal(scales_of(7.0 * queries, keys), scales_of(queries, 0.3 * keys))
    assert torch.equal(scales.of[1], torch.ones(2, 6))


def test_centred_keys_are_less_their_mean_and_differ_by_one_number_for_a_query() -> None:
    queries, keys = _looked_at(torch_generator(5))
    scales, queries, keys = KeyScales(2, centred=True), queries.double(), keys.double() + 3.0
    scales.settle([0, 1], queries, keys, keys.device)
    kept, asked = scales.kept(keys), torch.randn(2, 4, 6, generator=torch_generator(6)).double()
    assert torch.equal(scales.seen(torch.zeros_like(kept))[:, :, 0], mean_of(keys, None))
    torch.testing.assert_close(scales.seen(kept), keys)
    found = scales.asked(asked).view(2, 2, 2, 6) @ kept.transpose(-1, -2)
    shift = asked.view(2, 2, 2, 6) @ keys.transpose(-1, -2) - found
    torch.testing.assert_close(shift, shift[..., :1].expand_as(shift))


@pytest.mark.parametrize("shared", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 65])
def test_the_mean_is_of_the_prompt_without_its_first_token(length: int, shared: int) -> None:
    whole = torch.randn(2, 3, shared + length, 4, generator=torch_generator(7))
    whole[:, :, :shared] = whole[:1, :, :shared]
    past = whole[0, :, :shared] if shared else None
    some = whole[:, :, 1:]
    expected = some.mean(2) if some.shape[2] else torch.zeros(2, 3, 4)
    assert torch.equal(mean_of(whole[:, :, shared:], past), expected.bfloat16().float())


def test_channels_without_numbers() -> None:
    for queries, keys in ((torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)), (torch.ones(1, 1, 2, 4),) * 2):
        assert torch.equal(scales_of(queries, keys), torch.ones(1, 1, 4))
    keys = torch.tensor([0.0, 1.0, torch.inf, torch.nan]).view(1, 1, 1, 4)
    assert torch.isfinite(scales_of(torch.ones(1, 2, 1, 4), keys)).all()


def test_what_there_is_not() -> None:
    with pytest.raises(UsageError, match="cache_rotation is 'scales'"):
        EngineConfig(cache_rotation="scales")  # type: ignore[arg-type]
