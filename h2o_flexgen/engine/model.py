"""A model before it is placed: its shape, its source of weights, its tokenizer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.base import RankedPolicy
from h2o_flexgen.checkpoint.content import model_content
from h2o_flexgen.checkpoint.files import generation_settings
from h2o_flexgen.checkpoint.hub import ResolvedModel, resolve_model
from h2o_flexgen.checkpoint.opening import open_stored
from h2o_flexgen.checkpoint.quantising import QuantisingSource, kept_importance
from h2o_flexgen.checkpoint.source import DummySource, WeightSource
from h2o_flexgen.config.checks import shown
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import computed_dtype
from h2o_flexgen.config.offload import elsewhere
from h2o_flexgen.config.recall import with_caches_near
from h2o_flexgen.config.sampling import shapes_greedy
from h2o_flexgen.config.workload import check_eviction, counted_in_bytes
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ModelError, OwnHeadError, UsageError, finding_model
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.models.decoder import Decoder, random_tokens
from h2o_flexgen.models.families import by_modules, spec_from_config
from h2o_flexgen.models.nested import untied
from h2o_flexgen.models.quantized import packings_of_config

log = logging.getLogger(__name__)


@dataclass
class Model:
    """A model that `open_model` found, with open files until `source` is closed.

    stored         the checkpoint's weights; source: the weights as in `spec`
    choices        specs that a planner may choose instead, by the bits of weights
    by_importance  whether weights of 4 bits are rounded by the importance of inputs, see `weigh_inputs`
    """

    spec: ModelSpec
    stored: WeightSource
    codec: TextCodec | None
    dtype: str
    folder: Path | None
    origin: str
    choices: Mapping[int, ModelSpec] = field(default_factory=dict)
    by_importance: bool = False
    found: ResolvedModel | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.keep_as(self.spec)

    def keep_as(self, spec: ModelSpec) -> None:
        """From now on `source` gives the weights as in `spec`, one of `choices`."""
        plain = spec.arch.experts is None and not isinstance(spec, ModuleSpec)
        weighs = self.by_importance and not self.dummy and plain
        self.spec, self.source = spec, self.stored
        if dict(spec.packings).items() - self.stored.packings.items():
            self.source = QuantisingSource(self.stored, spec, by_importance=weighs)

    def weigh_inputs(self, offload: Path, device: torch.device, progress: Callable[[str, int, int], None]) -> None:
        """Measures the importance of inputs before weights are packed by it, or reads it from an earlier run."""
        source = self.source
        if isinstance(source, QuantisingSource) and source.by_importance and source.importance is None:
            note = partial(progress, "measuring inputs")
            tokens = random_tokens(self.spec).to(device)
            plain = replace(self.spec, packings=())
            source.importance = kept_importance(plain, self.stored, tokens, self.dtype, offload, note)

    @property
    def dummy(self) -> bool:
        return self.stored.dummy

    def content(self) -> dict[str, str]:
        """Digests of the model's files, equal for every copy of them. Reads some of the weights, and raises as that
        does."""
        return {} if self.found is None else model_content(self.found, self.stored)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turns garbage collection off: for a vocabulary of 262,144 it would take a third of the time of reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
@finding_model()
def open_model(config: EngineConfig, device: torch.device, make: Callable[..., object]) -> Model:
    """Finds the model that `config` names, and checks it without reading weights. make: the Engine, see `self_test`.
    ModelError if it cannot be used. Dummy weights need only a config.json."""
    found = resolve_model(**config.named, need_weights=config.weights != "dummy")
    try:
        return _opened(found, config, device, make)
    except OwnHeadError as error:
        log.warning("%s; as in transformers it is the output head all the same", error.found)
        return _opened(replace(found, config=untied(found.config)), config, device, make)


def _opened(found: ResolvedModel, config: EngineConfig, device: torch.device, make: Callable[..., object]) -> Model:
    """As `open_model`, of a found model. OwnHeadError if config.json denies the output head that the checkpoint has."""
    dummy = config.weights == "dummy"
    impl = found.impl(config.model_impl)
    if by_modules(found.config, found.name, impl):
        from h2o_flexgen.engine.self_test import tested_spec  # imports transformers

        spec = tested_spec(found.config, found.name, make)
    else:
        spec = spec_from_config(found.config, found.name, impl)
    for said in spec_warnings(spec, config.eviction):
        log.warning(said)
    spec = _with_generation_eos(spec, found.folder)
    spec = config.caching(spec)
    if dummy:
        spec = replace(spec, packings=tuple(packings_of_config(found.config, spec).items()))
    source: WeightSource = DummySource(spec, spec.dtype, config.seed) if dummy else open_stored(found, spec)
    with ExitStack() as stack:
        stack.callback(source.close)
        dtype = computed_dtype(config.dtype, source.dtype, device.type == "cuda")
        if found.gguf is not None:
            codec = TextCodec.of_gguf(found.gguf.metadata, found.gguf.path)
        else:
            codec = TextCodec.open(Path(found.tokenizer_folder) if found.tokenizer_folder else None)
        if codec is not None and not config.eviction.rolling_positions:
            codec.context = spec.max_positions
        if dummy:
            # Random numbers have no stored dtype: making them in the dtype they are used in saves a conversion.
            source = DummySource(spec, dtype, config.seed)
        stored = replace(spec, packings=tuple(sorted(source.packings.items())))
        kept, choices = config.kept(stored), config.choices(stored)
        stack.pop_all()
    folder = Path(found.folder) if found.folder else None
    return Model(kept, source, codec, dtype, folder, found.origin, choices, config.weight_importance, found)


def decoder_of(spec: ModelSpec, weights: WeightSource, dtype: str, device: torch.device) -> Decoder:
    """The decoder of a model; tensors that stay float32 are read from `weights`. ModelError if transformers' modules
    cannot compute in the model's dtype."""
    if not isinstance(spec, ModuleSpec):
        return Decoder(spec)
    from h2o_flexgen.models.hf.decoder import ModuleDecoder  # imports transformers

    decoder = ModuleDecoder(spec, torch_dtype(dtype), device)
    for name in decoder.exact:
        tensor = torch.empty(spec.tensors[name].shape)
        weights.read_into(name, tensor)
        decoder.keep(name, tensor.to(device))
    return decoder


def for_model(config: EngineConfig, spec: ModelSpec, compute_tier: str) -> EngineConfig:
    """The settings for a model that computes on this tier. UsageError for those that it cannot have."""
    config = replace(config, eviction=counted_in_bytes(config.eviction, spec))
    if isinstance(spec, ModuleSpec):
        config = for_modules(config, spec, compute_tier)
    if spec.arch.experts is not None and config.num_gpus > 1:
        found = f"--num-gpus is {config.num_gpus} for {spec.name}"
        raise UsageError(found, "needed 1: mixtures of experts run on one GPU")
    check_eviction(spec, config.eviction)
    recall = config.eviction.recall
    if recall is None:
        return config
    if config.num_gpus > 1:
        raise UsageError(f"--recall {recall} is given with --num-gpus {config.num_gpus}", "needed one GPU")
    return replace(config, policy=with_caches_near(config.fixed, recall, compute_tier))


def for_modules(config: EngineConfig, spec: ModuleSpec, compute_tier: str) -> EngineConfig:
    """The settings for a model of transformers' modules, with hidden states and attention on the compute tier.
    UsageError for those that it cannot have."""
    what = f"for {spec.name}, which is computed by transformers' own modules"
    if spec.alone:
        config = _for_rows(config, f"{what}, row by row", compute_tier)
    if config.num_gpus > 1:
        raise UsageError(f"--num-gpus is {config.num_gpus} {what}", "needed 1")
    policy = make_policy(config.eviction)
    if isinstance(policy, RankedPolicy) and policy.raw_queries:
        raise UsageError(
            f"the eviction policy is {config.eviction.name} {what}",
            "needed a policy that does not look at queries before they are rotated",
        )
    if spec.arch.positions == "biases" and isinstance(policy, RankedPolicy) and policy.compares_keys:
        raise UsageError(
            f"the eviction policy is {config.eviction.name} {what}, with biases by distance (ALiBi) in its keys",
            "needed a policy that does not compare keys",
        )
    if spec.arch.chunked and config.eviction.spans:
        raise UsageError(
            f"spans are {config.eviction.spans!r} {what}, and whose layers attend by chunks",
            "needed no spans: a chunk's tokens go when the next one begins",
        )
    if spec.has_states:
        _check_states(config, what)
        config = replace(config, policy={**config.fixed, "cpu_cache_compute": False})
    hidden = config.fixed.get("hidden", {compute_tier: 1.0})
    if elsewhere(hidden, compute_tier):
        raise UsageError(f"hidden states are placed on {', '.join(hidden)} {what}", f"needed all on {compute_tier}")
    if config.fixed.get("cpu_cache_compute") and compute_tier != "cpu":
        raise UsageError(
            f"--cpu-cache-compute is given {what}", f"needed attention on {compute_tier}, where modules wait for it"
        )
    return replace(config, policy={**config.fixed, "hidden": {compute_tier: 1.0}, "cpu_cache_compute": False})


def _for_rows(config: EngineConfig, what: str, compute_tier: str) -> EngineConfig:
    """The settings for sequences with the modules' own caches. UsageError for settings of other caches."""
    eviction, places = config.eviction, config.fixed.get("cache", {compute_tier: 1.0})
    if eviction.keeps_all and not eviction.rolling_positions:
        eviction = EvictionConfig(seed=eviction.seed)
    asked = {
        f"the eviction policy is {eviction.name}": eviction.name != "full",
        "--rolling-positions is given": eviction.rolling_positions,
        f"cache_bits is {config.cache_bits}": config.cache_bits != 16,
        f"caches are placed on {', '.join(places)}": bool(elsewhere(places, compute_tier)),
        "cpu_cache_compute is given": bool(config.fixed.get("cpu_cache_compute")) and compute_tier != "cpu",
        "a store of prefixes is asked for": config.keeps_prefixes,
        "record_scores is given": config.record_scores,
    }
    for found, given in asked.items():
        if given:
            raise UsageError(f"{found} {what}", "needed full caches of the modules' own, on the tier that computes")
    policy = {**config.fixed, "cache": {compute_tier: 1.0}}
    return replace(config, eviction=eviction, policy=policy, share_prefixes=False)


def spec_warnings(spec: ModelSpec, eviction: EvictionConfig) -> list[str]:
    """Warnings for models that run row by row, and for a budget of models without attention."""
    found = list[str]()
    if isinstance(spec, ModuleSpec) and spec.alone:
        found.append(
            f"{spec.name} runs row by row ({spec.alone}): without budgets and shared prefixes, and one sequence at a "
            "time in each product"
        )
    attending = any(spec.attends(layer) for layer in range(spec.num_layers))
    if not attending and not eviction.keeps_all:
        found.append(
            f"{spec.name} has no layer that attends: --eviction {eviction.name} has nothing to evict, and its states "
            "are as large with every budget"
        )
    return found


def _check_states(config: EngineConfig, what: str) -> None:
    what = f"{what}, some of whose layers keep states"
    if config.fixed.get("cpu_cache_compute"):
        raise UsageError(f"cpu_cache_compute is on {what}", "needed off: states are computed with where weights are")
    if config.keeps_prefixes:
        raise UsageError(
            f"a store of prefixes is asked for {what}",
            "needed none: prefixes are shared within a block",
        )
    if config.eviction.split.replays:
        raise UsageError(
            f"the eviction policy is {config.eviction.name} {what}", "needed a policy that reads prompts once"
        )


def _with_generation_eos(spec: ModelSpec, folder: Path | None) -> ModelSpec:
    """generation_config.json goes before config.json, as in transformers: tokens that end a turn are only there."""
    if folder is None:
        return spec
    path = Path(folder) / "generation_config.json"
    stored = generation_settings(path)
    if shaping := shapes_greedy(stored):
        asked = ", ".join(f"{name}={shown(value)}" for name, value in shaping.items())
        log.warning("%s asks for %s: only generate_ids looks there, other calls do what they are told", path, asked)
    eos = stored.get("eos_token_id")
    said = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in said):
        raise ModelError(f"eos_token_id is {eos!r} in {path}", "needed a token id or a list of them")
    tokens = tuple(token for token in said if 0 <= token < spec.vocab_size)  # others can never be chosen
    if not tokens:
        return spec
    return replace(spec, eos_token_id=tokens[0] if len(tokens) == 1 else tokens)
