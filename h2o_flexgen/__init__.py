"""h2o_flexgen: offline, throughput-oriented inference of language models that do not fit.

The public names below are imported when they are first asked for, so that `import h2o_flexgen` loads no torch.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from h2o_flexgen.openmp import spin_briefly

if TYPE_CHECKING:
    from h2o_flexgen.config.eviction import EvictionConfig
    from h2o_flexgen.config.offload import OffloadPolicy
    from h2o_flexgen.config.prompt import Prompt, Span
    from h2o_flexgen.config.reports.record import RunRecord
    from h2o_flexgen.config.sampling import SamplingParams
    from h2o_flexgen.engine.requests.sequence import RequestOutput
    from h2o_flexgen.planning.llm import LLM

    __version__: str

spin_briefly()

_module, *_ = [module for flag, module in pairwise(sys.orig_argv) if flag == "-m"] or [""]
_ours = _module.split(".")[0] == __name__ and _module.count(".") < 2 and not _module.endswith(".lm_eval")
if (_ours or sys.argv[0].endswith("/h2o-flexgen")) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # A program, whose frame does not listen yet: Ctrl-C would show a traceback, or be lost in an import's callback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

_HOMES = {
    "LLM": "planning.llm",
    "SamplingParams": "config.sampling",
    "OffloadPolicy": "config.offload",
    "EvictionConfig": "config.eviction",
    "Prompt": "config.prompt",
    "Span": "config.prompt",
    "RequestOutput": "engine.requests.sequence",
    "RunRecord": "config.reports.record",
}

__all__ = [
    "LLM",
    "EvictionConfig",
    "OffloadPolicy",
    "Prompt",
    "RequestOutput",
    "RunRecord",
    "SamplingParams",
    "Span",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("h2o_flexgen.config.reports.record").package_version()
    elif name in _HOMES:
        value = getattr(import_module(f"h2o_flexgen.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
