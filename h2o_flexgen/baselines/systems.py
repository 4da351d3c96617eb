"""The systems that can be compared: which adapter runs each, in which environment, with which options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_flexgen.registry import Registry

Options = Callable[[float], dict[str, Any]]
"""From --hh-ratio to the `options` of a Work."""

PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
"""Where scripts/peer_env.sh makes environments."""
_MADE = "installed"  # what it leaves in one that is complete


@dataclass(frozen=True)
class System:
    """One row of the comparison.

    adapter       module that runs it
    says          one line on how it is run, printed under the table
    own           whether it is this package: then a failure is ours
    environment   the folder of its interpreter below that of the peers, "" for the one that runs the comparison
    scratch       folder below the scratch folder, shared by the systems that name the same
    prepares      whether the adapter, given the word "prepare", makes files there that all its runs use
    """

    adapter: str
    says: str
    options: Options = lambda ratio: {}
    own: bool = False
    environment: str = ""
    scratch: str = "own"
    prepares: bool = False

    def python(self, peers: Path) -> str | None:
        """The interpreter that runs the adapter; None where its environment was not made."""
        if not self.environment:
            return sys.executable
        folder = peers / self.environment
        return str(folder / "bin" / "python") if (folder / _MADE).is_file() else None


_OWN = "h2o_flexgen.cli.adapter"  # a program: it plans as `run` does
_PEER = "h2o_flexgen.baselines."

SYSTEMS: Registry[System] = Registry("system")
for _name, _system in {
    "h2o": System(
        _OWN,
        "this package, KV cache at --hh-ratio",
        lambda ratio: {"name": "h2o", "ratio": ratio},
        own=True,
        prepares=True,
    ),
    "full": System(_OWN, "this package, full KV cache", own=True, prepares=True),
    "transformers": System(_PEER + "transformers", "model.generate, SDPA attention, its default cache", scratch="hf"),
    "static": System(
        _PEER + "transformers",
        "transformers with a static cache, allocated at full length and never copied to grow; nothing is compiled",
        lambda ratio: {"static": True},
        scratch="hf",
    ),
    "accelerate": System(
        _PEER + "accelerate",
        "transformers with weights by device_map over GPU, memory and disk; SDPA attention, default cache",
        environment="accelerate",
        scratch="hf",
        prepares=True,
    ),
    "flexgen": System(
        _PEER + "flexgen",
        "the published package, full KV cache; without a GPU shimmed to the CPU: host memory for its GPU, streams "
        "that do nothing, the dtype above for its float16",
        environment="flexgen",
        scratch="flexgen",
        prepares=True,
    ),
    "deepspeed": System(
        _PEER + "deepspeed",
        "ZeRO-Inference: stage 3, parameters offloaded, transformers' model.generate; SDPA attention, default cache",
        environment="deepspeed",
        scratch="hf",
        prepares=True,
    ),
    "kvpress": System(
        _PEER + "kvpress",
        "ObservedAttentionPress on the prompt, to the tokens that h2o keeps in all; eager attention",
        lambda ratio: {"ratio": ratio},
        environment="kvpress",
        scratch="hf",
    ),
}.items():
    SYSTEMS.register(_name, _system)
