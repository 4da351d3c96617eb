"""Which inputs of a model's matrices matter: measured once, and kept in the offload folder."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.errors import StorageError
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.models.importance import importance

log = logging.getLogger(__name__)

METHOD = "importance 1"
"""Changes whenever other numbers come of the same model and text."""
_FILE = "importance.pt"

Importance = Mapping[str, Tensor]
"""Of a matrix, by name: float32 (ins)."""


def kept_importance(
    spec: ModelSpec,
    source: WeightSource,
    tokens: Tensor,
    dtype: str,
    offload: Path,
    progress: Callable[[int, int], None],
) -> Importance:
    """`models.importance` of the model of `spec` over `tokens` (n, S), computed in `dtype` on the tokens' device.

    Read from the offload folder where an earlier run has left it, else measured and left there. Waits for another run
    that is measuring. Takes the memory of one unit. `progress` hears of the bytes read, and of all. Raises what
    `source` raises, and UsageError for a folder that is not to be trusted.
    """
    digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()
    identity = f"{METHOD} {source.fingerprint} {dtype} {digest}"

    total = sum(spec.groups_by_key[unit.weights].nbytes(dtype) for unit in spec.units[:-1])
    done = 0

    def read(group: WeightGroup) -> dict[str, Tensor]:
        nonlocal done
        tensors = {}
        for tensor in group.tensors:
            tensors[tensor.name] = torch.empty(tensor.shape, dtype=torch_dtype(dtype), device=tokens.device)
            source.read_into(tensor.name, tensors[tensor.name])
        done += group.nbytes(dtype)
        progress(done, total)
        return tensors

    def measured() -> dict[str, Tensor]:
        return {name: each.cpu() for name, each in importance(spec, read, tokens).items()}

    try:
        with OffloadDir(offload) as folder, folder.packed(identity) as path:
            found = _read(path / _FILE, spec)
            if found is None:
                found = measured()
                _write(path / _FILE, found)
            return found
    except StorageError as error:
        log.warning("which inputs matter is not kept for later runs: %s", error)
        return measured()


def _read(path: Path, spec: ModelSpec) -> dict[str, Tensor] | None:
    """What an earlier run has left; None where that is nothing, or not what it should be."""
    wanted = {each.name: each.shape for group in spec.weight_groups for each in group.tensors}
    try:
        found = torch.load(path, weights_only=True)
        fits = all(each.shape == wanted[name][1:] and each.dtype == torch.float32 for name, each in found.items())
    except FileNotFoundError:
        return None
    except Exception as error:  # torch and pickle raise whatever they stumble over
        fits, found = False, error
    if not fits:
        log.warning("%s cannot be used: inputs are measured again", path)
        return None
    return dict(found)


def _write(path: Path, found: Importance) -> None:
    """A file that is complete or not there. One that cannot be written is measured again by the next run."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(dict(found), temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        log.warning("which inputs matter cannot be kept in %s: %s", path.parent, error)
        temporary.unlink(missing_ok=True)
