"""The flags of `search`, and the question they ask. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.arguments import add_known_choices, eviction_of, policy_of
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import add_json, output_file, require_several
from h2o_flexgen.config.checks import share
from h2o_flexgen.config.engine import PLANNED_FIELDS, EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import add_arguments, between_commas, called, from_namespace, given, option
from h2o_flexgen.config.hardware.profile import HardwareProfile, find_profile, kept_profile, profile_names
from h2o_flexgen.config.model.known import is_gguf, known_config, model_folder, only_gguf, read_config, unknown_model
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.recall import with_caches_near
from h2o_flexgen.config.splits import AUTO
from h2o_flexgen.config.workload import Workload, check_eviction, counted_in_bytes, first_pass
from h2o_flexgen.cost.lp import SOLVERS
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import ask_for
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.quantized import read_quantization
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.units import GIB, MIB

USABLE = 0.9
"""The share of a machine's memory that plans take where no cap is given, as in `run`: the rest is for the system."""
PROCESS = {"cpu": 512 * MIB, "gpu": 3 * GIB}
"""Host bytes that a process holds before anything is placed: Python and torch, and CUDA's libraries and context."""
_LENGTHS = {"prompt_len": 512, "gen_len": 32}
_OF_ENGINE = {"model", "dtype", "device", "gpu_mem", "cpu_mem", "disk_mem"}
_OF_ENGINE |= {"weight_bits", "weight_group", "cache_bits", "cache_rotation", "cache_newest"}
_OF_ENGINE |= {"allow_compress", "dequantize"}
_OF_SMALL_CACHES = {"cache_bits", "cache_rotation", "cache_newest"}


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, between_commas(text)))
    except ValueError:
        found = ()
    if not found:
        raise UsageError(f"{text!r} are no shares", "needed numbers above 0 and at most 1: 0.5,0.2,0.1")
    return tuple(share(each, "--compare-kv-bytes") for each in found)


@dataclass(frozen=True)
class SearchArguments:
    """All of a command line, checked."""

    request: PlanRequest
    json: bool | None
    hardware: str | None = option(
        None,
        metavar="NAME|FILE",
        help=f"{', '.join(profile_names())}, or a file that calibrate wrote (default: this machine as calibrated)",
    )
    output: Path | None = option(None, "--output", "-o", metavar="FILE", help="the policy, for run --policy FILE")
    compare_kv_bytes: tuple[float, ...] = option(
        (),
        metavar="R,R",
        parse=_shares,
        help="then a table of what smaller caches buy: shares of the bytes of a full 16-bit cache, in which --eviction "
        "(auto, if it is full) keeps tokens",
    )
    simulate: Path | None = option(None, metavar="FILE", help="a timeline of the simulated run, for ui.perfetto.dev")
    overwrite: bool = option(False, help="replace an existing --output or --simulate FILE")
    solver: str = option(SOLVERS[0], choices=SOLVERS, help="solver of the linear programs (default: highs)")
    quiet: bool = option(False, "--quiet", "-q", help="print the JSON object alone")
    caches: tuple[PlanRequest, ...] = ()
    """The same question with the full cache, and with the shares of its bytes to compare."""


def parse_search(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> SearchArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    with search_parser().parsed(argv, environ) as args:
        return _checked(args)


def _checked(args: argparse.Namespace) -> SearchArguments:
    typed = given(SearchArguments, args)
    overwrite = "overwrite" in typed
    if overwrite and not typed.keys() & {"output", "simulate"}:
        raise UsageError("--overwrite is given without --output", "needed --output FILE or --simulate FILE")
    require_several({f"--{name}": typed.get(name) for name in ("output", "simulate")})
    for name in ("output", "simulate"):
        typed[name] = output_file(f"--{name}", typed.get(name), keep=not overwrite)
    eviction = eviction_of(args)
    typed["caches"] = _caches(args, eviction, typed.get("compare_kv_bytes", ()))
    # --quiet asks for nothing but the JSON object.
    json = True if args.json is None and "quiet" in typed else args.json
    return SearchArguments(_request(args, eviction), json, **typed)


def _caches(args: argparse.Namespace, eviction: EvictionConfig, shares: Sequence[float]) -> tuple[PlanRequest, ...]:
    """The full cache first. UsageError for what is no share, and where the policy cannot keep one."""
    if not shares:
        return ()
    named = replace(eviction, ratio=1.0, budget=None, bytes=None)
    if named.name == "full":
        named = replace(named, name=AUTO)
    asked = [replace(named, bytes=each) for each in shares]
    full = argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in _OF_SMALL_CACHES})
    requests = [_request(full, EvictionConfig()), *(_request(args, each) for each in asked)]
    for each in requests:  # a share too small for a token is said before anything is searched
        each.eviction.resolve(each.workload.prompt_len, each.workload.gen_len)
    return tuple(requests)


def search_parser() -> Parser:
    parser = Parser(
        prog=called("search"),
        usage="%(prog)s --model MODEL [--hardware NAME|FILE] [--hh-ratio R] [--output policy.json] [flags]",
        description="Finds the fastest placement and block of sequences for a model on a machine. No model is run.",
        epilog="Every flag can be set in the environment, as for run. Exit codes: 0 all well, 2 flags, 4 model, "
        "5 nothing fits the caps.",
    )
    add_json(add_arguments(parser, SearchArguments, title="machine and results", bare=True))
    add_arguments(parser, Workload, title="work", exclude={"num_sequences"}, defaults=_LENGTHS)
    count = "how many prompts (default: no end of them)"
    parser.add_argument("--num-prompts", type=int, default=argparse.SUPPRESS, metavar="N", help=count)
    add_arguments(parser, EvictionConfig, title="KV cache and eviction")
    others = {item.name for item in fields(EngineConfig)} - _OF_ENGINE
    add_arguments(parser, EngineConfig, title="model and machine", exclude=others)
    planned = dict.fromkeys(PLANNED_FIELDS)
    add_arguments(parser, OffloadPolicy, title="what is already decided", defaults=planned)
    add_known_choices(parser.add_argument_group("known from FlexGen and others"))
    return parser


def _request(args: argparse.Namespace, eviction: EvictionConfig) -> PlanRequest:
    engine = replace(from_namespace(EngineConfig, args), eviction=eviction)
    named = find_profile(args.hardware) if hasattr(args, "hardware") else None
    stored = engine.caching(_spec(engine.model, engine.model_impl))
    spec = engine.kept(stored)
    profile = named or kept_profile(spec, engine.dtype, engine.device)
    tier = _compute_tier(engine, profile)
    eviction = counted_in_bytes(eviction, spec)
    # As the engine runs it: prompt tokens beyond the context go through decode steps.
    asked = from_namespace(Workload, args, defaults=_LENGTHS)
    check_eviction(spec, eviction)
    most = first_pass(spec, eviction, asked.prompt_len, asked.gen_len, "a prompt (--prompt-len, --gen-len)")
    return PlanRequest(
        spec=spec,
        workload=replace(asked, prompt_len=most, gen_len=asked.total_len - most),
        eviction=eviction,
        dtype=profile.dtype_of(spec, engine.dtype, tier),
        caps=_caps(engine, profile, tier),
        compute_tier=tier,
        profile=profile,
        fixed=_fixed(args, engine, spec, eviction, tier),
        baseline=PROCESS[tier],
        endless=not hasattr(args, "num_prompts"),
        triton=not profile.rates(tier).torch_attention,
        choices=engine.choices(stored),
    )


def _compute_tier(engine: EngineConfig, profile: HardwareProfile) -> str:
    """The GPU where the machine has one, as `run` does."""
    if engine.device == "cpu" or (engine.device == "auto" and "gpu" not in profile.compute):
        return "cpu"
    profile.rates("gpu")
    return "gpu"


def _caps(engine: EngineConfig, profile: HardwareProfile, tier: str) -> Caps:
    """The cap as typed, else the machine's memory, less a little. UsageError for a GPU of unknown memory."""
    typed = {"gpu": engine.gpu_mem, "cpu": engine.cpu_mem, "disk": engine.disk_mem}
    if tier == "cpu":
        del typed["gpu"]
    elif engine.gpu_mem is None and "gpu" not in profile.memory:
        raise UsageError(
            f"the hardware profile {profile.name} does not say how much memory the gpu has",
            "needed --gpu-mem SIZE",
            "or --device cpu",
        )
    has = {name: int(USABLE * profile.memory[name]) for name in typed if name in profile.memory}
    caps: dict[str, Any] = {name: has.get(name) if cap is None else cap for name, cap in typed.items()}
    return Caps(**caps)


def _fixed(
    args: argparse.Namespace, engine: EngineConfig, spec: ModelSpec, eviction: EvictionConfig, tier: str
) -> dict[str, Any]:
    """The fields of the policy that stay as they are: the typed ones, or all of a --policy file's, and the ones that
    the model requires. UsageError for a value that it does not support."""
    decided = policy_of(args)
    if isinstance(spec, ModuleSpec):
        from h2o_flexgen.engine.model import for_model  # torch is there: modules made the spec

        return for_model(replace(engine, eviction=eviction, policy=decided), spec, tier).fixed
    return with_caches_near(replace(engine, policy=decided).fixed, eviction.recall, tier)


def _spec(name: str, impl: str = "auto") -> ModelSpec:
    """The shape of a model as it is stored in a folder, of a well-known name, or of one on the hub or in its cache."""
    # They load numpy, and for packed weights and names that nothing else knows torch.
    from h2o_flexgen.checkpoint.hub import resolve_model
    from h2o_flexgen.checkpoint.opening import as_stored, stored_spec

    folder = model_folder(name)
    ask_for(folder)
    known = known_config(name)
    gguf = is_gguf(folder.name) or only_gguf(folder)
    if (folder / "config.json").is_file() and not gguf:
        config = read_config(folder)
        if read_quantization(config, name) is None:
            return as_stored(spec_from_config(config, name, impl), folder)
    elif known is not None:
        return spec_from_config(known, name, impl)
    elif not gguf and ("/" not in name or folder.is_dir()):
        raise unknown_model(name)
    found = resolve_model(name, need_weights=False)
    return stored_spec(found, impl)
