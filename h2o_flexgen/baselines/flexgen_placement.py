"""Where FlexGen's weights and caches go: on a GPU of limited memory as its authors' own policies have it.

On a GPU everything where it fits. Else caches and hidden states in host memory, prompts in GPU batches, and on the
GPU as much of the weights as a batch at work leaves room for; the rest of them in host memory, or on the disk. Without
a GPU one GPU batch of all prompts, and the weights that host memory has no room for on the disk.
Arithmetic alone: FlexGen is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPU_BATCH = 32
"""Sequences of a GPU batch at most, where caches are in host memory."""
USABLE = 0.9
"""Of the GPU's memory: the allocator loses some."""


@dataclass(frozen=True)
class Placed:
    """The block's shape; percent of the weights on the GPU and in host memory; whether caches are on the GPU."""

    gpu_batch_size: int
    num_gpu_batches: int
    weights_gpu: int
    weights_cpu: int
    cache_on_gpu: bool


def place(config: Any, rows: int, prompt_len: int, gen_len: int, gpu: int, host: int) -> Placed:
    """For `rows` sequences, by FlexGen's configuration of the model; `gpu` and `host` in bytes."""
    length = prompt_len + gen_len
    weights = _weights(config)
    cache = config.cache_bytes(rows, length)
    if weights + cache + _working(config, rows, prompt_len, gen_len) <= USABLE * gpu:
        return Placed(rows, 1, 100, 0, cache_on_gpu=True)
    size = max(size for size in range(1, min(rows, GPU_BATCH) + 1) if rows % size == 0)
    # Caches of three layers, computed with, loaded and stored; weights of two, computed with and loaded.
    moving = 3 * config.cache_bytes(size, length) // config.num_hidden_layers
    moving += 2 * max(_table(config), 16 * config.hidden_size**2)
    share = _percent(USABLE * gpu - _working(config, size, prompt_len, gen_len) - moving, weights)
    rest = weights * (100 - share) / 100
    in_memory = 100 - share if rest + cache + config.hidden_bytes(rows, length) <= host else 0
    return Placed(size, rows // size, share, in_memory, cache_on_gpu=False)


def place_in_memory(config: Any, rows: int, prompt_len: int, gen_len: int, itemsize: int, host: int | None) -> Placed:
    """Without a GPU: host memory of `host` bytes (None: enough) stands for it, in numbers of `itemsize` bytes."""
    if host is None:
        return Placed(rows, 1, 100, 0, cache_on_gpu=True)
    held = config.cache_bytes(rows, prompt_len + gen_len) + _working(config, rows, prompt_len, gen_len)
    # Its four copy threads each keep a relay that grows to the largest tensor; two tables may be on their way at once.
    wide = itemsize / 2
    share = _percent(host - int(wide * (held + 6 * _table(config))), wide * _weights(config))
    return Placed(rows, 1, share, 0, cache_on_gpu=True)


def _percent(room: float, weights: float) -> int:
    return max(0, min(100, int(100 * room / weights)))


def _weights(config: Any) -> int:
    return int(config.model_bytes() + _table(config))  # the head is a second copy of the table


def _table(config: Any) -> int:
    return int(2 * config.vocab_size * config.input_dim)


def _working(config: Any, rows: int, prompt_len: int, gen_len: int) -> int:
    """Bytes of a prompt's pass: three times the scores of all heads, or the logits of all tokens; hidden states."""
    scores = 3 * rows * config.n_head * prompt_len**2 * 2
    logits = rows * prompt_len * config.vocab_size * 2
    return int(max(scores, logits) + 8 * config.hidden_bytes(rows, prompt_len + gen_len))
