"""A tiny model's packed weights: the folder they lie in, its files, and what those hold."""

from __future__ import annotations

from pathlib import Path

import torch

from h2o_flexgen.checkpoint.pack import PackedUnit
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import views
from h2o_flexgen.memory.rundir import OffloadDir
from tests.checkpoint.models import make_spec

SPEC = make_spec()
GROUPS = SPEC.weight_groups


def packed_folder(offload: OffloadDir) -> Path:
    (folder,) = offload.path.glob("packed-*")
    return folder


def unit_files(offload: OffloadDir) -> list[str]:
    return sorted(path.name for path in packed_folder(offload).iterdir() if path.name != "lock")


def contents(units: dict[str, PackedUnit]) -> dict[str, torch.Tensor]:
    """Every tensor of the units, read as the engine reads them."""
    found = {}
    with CopyEngine() as copies:
        for unit in units.values():
            buffer = torch.full((unit.layout.nbytes,), 255, dtype=torch.uint8)
            copies.read_extents(unit.extents, buffer, digest=unit.checksum).wait()
            found |= {name: view.clone() for name, view in views(unit.layout, buffer).items()}
    return found
