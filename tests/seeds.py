"""Seeds of what tests draw. H2O_TEST_SEED=N, 0 by default, gives all tests other inputs."""

from __future__ import annotations

import os
import random

import torch

SEED = int(os.environ.get("H2O_TEST_SEED", "0"))


def moved(seed: int = 0) -> int:
    """A test's own seed, and another one for every SEED."""
    return seed + 1_000_003 * SEED


def torch_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(moved(seed))


def python_random(seed: int = 0) -> random.Random:
    return random.Random(moved(seed))
