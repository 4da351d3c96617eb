"""The settings of an engine: which model, which machine limits, which policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from os import PathLike, fspath
from typing import Annotated, Any, Literal

from h2o_flexgen.config.checks import Checked, Count, Natural, among, known_keys, one_of, shown, whole
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import between_commas, option
from h2o_flexgen.config.model.packing import CacheBits, CacheRotation
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import DTYPES
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion
from h2o_flexgen.units import MIB, parse_bytes

Device = Literal["auto", "cpu", "cuda"]
ModelImpl = Literal["auto", "native", "transformers"]
BITS = (16, 8, 4)
Bits = Annotated[int, partial(one_of, allowed=BITS)]
Dtype = Annotated[str, partial(one_of, allowed=("auto", *DTYPES))]
LARGEST_GROUP = 1024
NEWEST = 16
"""Tokens of which caches with a budget in bytes keep the packing errors, too: queries look at what is near most."""
FEW = (4, 3)
"""Bits of its keys and values, unless asked for, where heads allow that: values bear more rounding than keys do."""
POLICY_FIELDS = frozenset(item.name for item in dataclasses.fields(OffloadPolicy))
PLANNED_FIELDS = frozenset(
    {"gpu_batch_size", "num_gpu_batches", "weights", "cache", "hidden", "cpu_cache_compute", "lookahead"}
)
"""The fields that a planner may choose. One that goes by rule leaves the last two at their defaults."""
MEASURED_FIELDS = {
    *("model", "path", "revision", "offline", "model_impl", "dtype", "device", "cpu_mem", "emulate_gpu", "offload_dir"),
    *("weight_bits", "weight_group", "dequantize"),
}
"""The settings that say what a calibration measures, and where."""


def _size(*names: str, help: str, unset: str = "what is free") -> Any:
    text = f"{help}; 16 and 16GiB are the same"
    return option(None, *names, help=text, metavar="SIZE", parse=_checked_size, unset=unset)


def _checked_size(text: str) -> str:
    """The text itself: the field says what a number means, and it is to be read once."""
    parse_bytes(text)
    return text


def _cache_bits(text: str) -> CacheBits:
    try:
        bits = tuple(int(word) for word in between_commas(text))
    except ValueError:
        raise UsageError(f"{text!r} is not a number of bits", "needed 16, 8, 4, or two: 8,4") from None
    return bits[0] if len(bits) == 1 else bits  # type: ignore[return-value]


PREFIX_MEM, PREFIX_DISK = 1 << 30, 16 << 30
"""Caps of a store of prefixes where none are given."""


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The settings of `LLM`. Sizes are given as bytes or text ("8GiB", a bare number counts GiB) and kept in bytes.

    Fields mean what the flags' help says; besides:

    policy        "auto", an OffloadPolicy, or a mapping of the fields that are fixed; the others are then chosen
    cache_rotation  "rotate" is a Hadamard transform; with "scale" keys are scaled by channel first, with "centre" after
                  their mean has been taken from them, and the first token is kept as the newest are
    prefix_mem, prefix_dir, prefix_disk   a store of keys and values of prefixes that come back over blocks, calls and,
                  in a folder, processes; none without one of the first two
    trace         whether `LLM.timeline` has who was busy when, and memory over time
    record_scores whether `LLM.score_log` has what the prompts' tokens scored; small prompts only
    """

    CALLED = "{}"
    model: str = option(
        "demo", "--model", "-m", help="name (opt-30b, facebook/opt-30b), folder, demo, demo-stream or -sums"
    )
    path: str | None = option(None, help="folder with models by name; _DUMMY_ is --weights dummy", metavar="DIR")
    revision: str | None = option(None, help="revision of the model on the hub", metavar="REV")
    offline: bool | None = option(None, help="never use the network", unset="HF_HUB_OFFLINE")
    model_impl: ModelImpl = option(
        "auto",
        help="native: a family of this engine; transformers: its modules; auto: modules where there is no family",
        metavar="IMPL",
    )
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    policy: str | OffloadPolicy | Mapping[str, Any] = "auto"
    weights: Literal["checkpoint", "dummy"] = option(
        "checkpoint", "--weights", "--load-format", help="checkpoint, or dummy: random weights", metavar="KIND"
    )
    dtype: Dtype = option("auto", help="auto, float32, bfloat16, float16")
    weight_bits: Bits = option(16, help="bits of weights: 16, or 8 or 4, packed while loading")
    weight_group: int = option(64, help="inputs of a packed weight that share a scale")
    weight_importance: bool = option(True, help="measure which inputs matter before weights are packed in 4 bits, once")
    allow_compress: bool = option(False, help="let the search choose 16, 8 or 4 bits for weights")
    cache_bits: CacheBits = option(
        16,
        help="bits of cached keys and values: 16, 8 or 4; 8,4: keys in 8, values in 4, which may have 3",
        metavar="N",
        parse=_cache_bits,
    )
    cache_rotation: CacheRotation | None = option(
        None,
        help="before packing: rotate spreads outliers, scale also fits keys to queries, centre takes their mean; none",
        metavar="HOW",
        unset="centre with --kv-bytes where logits have neither caps nor sinks, else scale",
    )
    cache_newest: Natural | None = option(
        None,
        help="newest tokens of which packed caches also keep what packing cost them, packed",
        unset="16 with --kv-bytes, else 0",
    )
    dequantize: bool = option(False, help="expand weights that the checkpoint has packed")
    device: Device = option("auto", help="auto, cpu, cuda")
    gpu_mem: int | None = _size(help="memory the run may use of each GPU")
    cpu_mem: int | None = _size(help="host memory the whole process may use")
    disk_mem: int | None = _size("--nvme-mem", "--disk-mem", help="disk space the run may use")
    emulate_gpu: int | None = _size(help="a gpu tier of this capacity in host memory", unset="none")
    num_gpus: Count = option(1, help="GPUs that the layers are divided among")
    offload_dir: str | None = option(
        None,
        "--offload-dir",
        "--offload-folder",
        help="folder for packed weights and the disk tier",
        metavar="DIR",
        unset="~/.cache/h2o_flexgen/offload",
    )
    verify: Literal["first", "always", "never"] = option(
        "first", help="checksums of packed weights: first, always or never read", metavar="WHEN"
    )
    check_finite: bool = option(False, help="say in which unit numbers stop being finite; slow")
    share_prefixes: bool = option(True, help="compute prefixes that prompts of a block share once")
    prefix_mem: int | None = _size(help="host memory for prefixes that come back", unset="none")
    prefix_dir: str | None = option(None, help="folder that keeps prefixes for later runs", metavar="DIR", unset="none")
    prefix_disk: int | None = _size(help="disk space for these prefixes", unset="16GiB")
    trace: bool = False
    record_scores: bool = False
    seed: Natural = option(0, help="seed of sampling, dummy weights and random eviction")

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("gpu_mem", "cpu_mem", "disk_mem", "emulate_gpu", "prefix_mem", "prefix_disk"):
            value = getattr(self, name)
            if value is not None:
                # Whole numbers from code are bytes already once they are large; text and small numbers count GiB.
                size = value if isinstance(value, int) and value >= MIB else parse_bytes(value)
                if 0 < size < MIB:
                    raise UsageError(f"{name} is {value}", "needed 0, or at least 1MiB")
                object.__setattr__(self, name, size)
        if self.prefix_disk is not None and self.prefix_dir is None:
            raise UsageError("--prefix-disk is given without --prefix-dir", "needed the folder that it is the cap of")
        if self.keeps_prefixes and not self.share_prefixes:
            raise UsageError("a store of prefixes is asked for, and share_prefixes is off", "needed one or the other")
        if isinstance(self.cache_bits, list):  # as JSON has pairs
            object.__setattr__(self, "cache_bits", tuple(self.cache_bits))
        if not among(self.cache_bits, (*BITS, *product(BITS[1:], (*BITS[1:], 3)))):
            needed = "needed 16, 8, 4, or two: of keys 8 or 4, of values 8, 4 or 3"
            raise UsageError(f"cache_bits is {self.cache_bits!r}", needed)
        group = whole(self.weight_group, "weight_group", 32)
        if group & (group - 1) or group > LARGEST_GROUP:
            raise UsageError(f"weight_group is {group}", f"needed a power of two from 32 to {LARGEST_GROUP}")
        if self.allow_compress and self.weight_bits != 16:
            raise UsageError(
                f"weight_bits={self.weight_bits} is given with allow_compress=True, which would choose them",
                "needed one of them",
            )
        if isinstance(self.policy, str):
            one_of(self.policy, "policy", ("auto",))
        elif not isinstance(self.policy, OffloadPolicy):
            if not isinstance(self.policy, Mapping):
                needed = 'needed "auto", an OffloadPolicy, or a dict of some of its fields'
                raise UsageError(f"policy is {self.policy!r}", needed)
            for key in self.policy:
                if key not in POLICY_FIELDS:
                    raise UsageError(
                        f"policy has no field {key!r}",
                        f"needed {', '.join(sorted(POLICY_FIELDS))}",
                        suggestion(str(key), POLICY_FIELDS),
                    )
            OffloadPolicy(**self.policy)  # a value that is none is refused before the model is loaded

    def _check_kinds(self) -> None:
        super().__post_init__()
        for name in ("path", "revision", "offload_dir", "prefix_dir"):
            value = getattr(self, name)
            if not isinstance(value, str | PathLike | None):
                raise UsageError(f"{name} is {shown(value)}", "needed a text")
            object.__setattr__(self, name, (value and fspath(value)) or None)  # an empty name is none
        if not isinstance(self.model, str | PathLike):
            raise UsageError(f"model is {shown(self.model)}", "needed a name, a folder or a file")
        object.__setattr__(self, "model", fspath(self.model))
        if not isinstance(self.eviction, EvictionConfig):
            raise UsageError(f"eviction is {shown(self.eviction)}", 'needed EvictionConfig(name="h2o", ratio=0.2)')

    @classmethod
    def of(cls, model: str | PathLike[str], **settings: Any) -> EngineConfig:
        """From keyword arguments, torch's dtypes and devices as their names; UsageError for an unknown one."""
        torchs = {key: each for key, each in settings.items() if type(each).__module__ == "torch"}
        named = {key: str(each).removeprefix("torch.") for key, each in torchs.items()}
        return cls(**known_keys({"model": model, **settings, **named}, cls))

    def kept(self, stored: ModelSpec) -> ModelSpec:
        """A model, `stored` as its checkpoint has it, as its weights are kept in memory; until a planner chooses their
        bits, that is with all of them. Experts that are stored packed, as MXFP4's are, stay so, and the others get the
        bits; UsageError where more than experts is stored packed."""
        if self.weight_bits == 16 and not self.dequantize:
            return stored
        if not self.dequantize and any(".experts." not in name for name, _ in stored.packings):
            raise UsageError(
                f"weight_bits is {self.weight_bits} for {stored.name}, whose checkpoint has packed weights",
                "needed a checkpoint of 16 bits or more",
                "leave it out, or dequantize as well: what is expanded is then packed anew",
            )
        plain = replace(stored, packings=()) if self.dequantize else stored
        return plain if self.weight_bits == 16 else plain.with_bits(self.weight_bits, self.weight_group)

    def choices(self, stored: ModelSpec) -> dict[int, ModelSpec]:
        """By bits of weights, most first, the specs that a planner may choose among; none where bits are decided."""
        if not self.allow_compress or (stored.packings and not self.dequantize):
            return {}
        return {bits: replace(self, allow_compress=False, weight_bits=bits).kept(stored) for bits in BITS}

    def caching(self, spec: ModelSpec) -> ModelSpec:
        """`spec`, as caches keep its keys and values. UsageError where they cannot."""
        by_bytes, bits, newest = self.eviction.bytes is not None, self.cache_bits, self.cache_newest
        if not spec.keeps_caches:
            if bits == 16:
                return spec
            raise UsageError(f"cache_bits is {bits} for {spec.name}, which runs row by row", "needed 16")
        if spec.arch.positions == "biases" and (by_bytes or bits != 16):
            found = "--kv-bytes is given" if by_bytes else f"cache_bits is {bits}"
            raise UsageError(
                f"{found}, and keys of {spec.name} have biases by distance (ALiBi), which few bits would lose",
                "needed keys of 16 bits, and a budget in tokens",
            )
        if newest is None:
            newest = NEWEST if by_bytes else 0
        dims = [spec.heads_of(layer).dim for layer in range(spec.num_layers) if spec.attends(layer)]
        if by_bytes and bits == 16 and dims:  # which by bytes are the same as by tokens
            bits = FEW[0] if any(dim % 16 for dim in dims) else FEW
        centred = by_bytes and not spec.arch.sinks and spec.arch.attention_cap is None
        return spec.with_cache_bits(bits, self.cache_rotation or ("centre" if centred else "scale"), newest)

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of `checkpoint.hub.resolve_model` that say which model this is."""
        return {"name": self.model, "path": self.path, "revision": self.revision, "offline": self.offline}

    @property
    def keeps_prefixes(self) -> bool:
        return bool(self.prefix_mem) or self.prefix_dir is not None

    @property
    def fixed_policy(self) -> OffloadPolicy:
        """The policy as far as it was given; the fields in `free_fields` hold defaults."""
        return OffloadPolicy(**self.fixed)

    @property
    def fixed(self) -> dict[str, Any]:
        if isinstance(self.policy, str):
            return {}
        return dict(vars(self.policy) if isinstance(self.policy, OffloadPolicy) else self.policy)

    @property
    def free_fields(self) -> frozenset[str]:
        return PLANNED_FIELDS - set(self.fixed)
