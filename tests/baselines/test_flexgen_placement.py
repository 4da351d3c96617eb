"""Where FlexGen's weights and caches go on a GPU: within the limits, and as its authors have it at their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from h2o_flexgen.baselines.flexgen_placement import GPU_BATCH, place

GB = 10**9


@dataclass(frozen=True)
class Sizes:
    """What FlexGen's own configuration of an OPT model says, two bytes per number."""

    num_hidden_layers: int
    hidden_size: int
    n_head: int
    vocab_size: int = 50272

    @property
    def input_dim(self) -> int:
        return self.hidden_size

    def model_bytes(self) -> int:
        return 2 * (self.num_hidden_layers * 12 * self.hidden_size**2 + self.vocab_size * self.hidden_size)

    def cache_bytes(self, rows: int, length: int) -> int:
        return 4 * rows * length * self.num_hidden_layers * self.hidden_size

    def hidden_bytes(self, rows: int, length: int) -> int:
        return 2 * rows * length * self.hidden_size


SMALL, LARGE = Sizes(32, 4096, 32), Sizes(48, 7168, 56)


def test_everything_on_a_gpu_that_has_room() -> None:
    placed = place(SMALL, 24, 512, 32, 140 * GB, 200 * GB)
    assert (placed.gpu_batch_size, placed.num_gpu_batches, placed.weights_gpu, placed.cache_on_gpu) == (
        24,
        1,
        100,
        True,
    )


def test_the_paper_s_large_model() -> None:
    """Published for 16 GB: a fifth of the weights on the GPU, the rest and all caches in host memory, batches of 48."""
    placed = place(LARGE, 96, 512, 32, 16 * GB, 208 * GB)
    assert (placed.gpu_batch_size, placed.num_gpu_batches, placed.cache_on_gpu) == (32, 3, False)
    assert 3 <= placed.weights_gpu <= 20
    assert placed.weights_gpu + placed.weights_cpu == 100


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 64, 97, 192])
@pytest.mark.parametrize("gpu", [6 * GB, 16 * GB, 24 * GB])
@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_every_sequence_has_a_place(rows: int, gpu: int, model: Sizes) -> None:
    placed = place(model, rows, 512, 32, gpu, 208 * GB)
    assert placed.gpu_batch_size * placed.num_gpu_batches == rows
    held = placed.weights_gpu / 100 * model.model_bytes()
    if placed.cache_on_gpu:
        held += model.cache_bytes(rows, 544)
    else:
        assert placed.gpu_batch_size <= GPU_BATCH
    assert held <= gpu


def test_the_disk_takes_what_host_memory_has_no_room_for() -> None:
    placed = place(LARGE, 32, 512, 32, 16 * GB, 60 * GB)
    assert placed.weights_cpu == 0
    assert placed.weights_gpu < 100
