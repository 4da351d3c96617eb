"""The systems that can be compared, and what a comparison is asked to do with them: model, lengths, repetitions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from h2o_flexgen.config.checks import Checked, Count, Natural, Ratio, one_of, whole
from h2o_flexgen.config.engine import Bits, Device, ModelImpl
from h2o_flexgen.config.flags import between_commas, flag_of, option, with_commas
from h2o_flexgen.config.model.known import known_config, model_folder, read_config, unknown_model
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.registry import Registry
from h2o_flexgen.units import parse_bytes

Options = Callable[[float], dict[str, Any]]
"""From --hh-ratio to the `options` of an AdapterWork."""

PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
"""Where scripts/peer_env.sh makes environments."""
AUTO = "auto"
_OWN = "h2o_flexgen.baselines.own"
_PEER = "h2o_flexgen.baselines."
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
    "airllm": System(
        _PEER + "airllm",
        "AirLLM: transformers' modules, read from disk one by one for every pass; SDPA attention, default cache",
        environment="airllm",
        scratch="airllm",
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
LLAMACPP = "llamacpp"
LLAMACPP_TYPES = {
    "q4_0": "Q4_0 in all matrices",
    "q4_k": "Q4_K_M, a mix of Q4_K and Q6_K",
    "q8_0": "Q8_0 in all matrices",
    "bf16": "bfloat16",
    "f16": "float16",
}
"""Each is a system of its own, `llamacpp-q4_0`; "llamacpp" among those asked for is those of --llamacpp-types."""
for _name, _weights in LLAMACPP_TYPES.items():
    _system = System(
        _PEER + "llamacpp",
        f"llama.cpp's own benchmark on the CPU, weights in {_weights}, full KV cache in float16; it is fed "
        "random tokens and chooses none; OpenMP's threads wait passively",
        partial(lambda kind, ratio: {"type": kind}, _name),
        environment=LLAMACPP,
        scratch=LLAMACPP,
        prepares=True,
    )
    SYSTEMS.register(f"{LLAMACPP}-{_name}", _system)
NAMES = (*(name for name in SYSTEMS.names() if not name.startswith(LLAMACPP)), LLAMACPP)
"""The values of --systems, as its help shows them."""


def usable_threads() -> int:
    """OMP_NUM_THREADS where it is set, else the cores this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return () if text.strip() == AUTO else tuple(map(int, between_commas(text)))
    except ValueError:
        raise UsageError(f"--batch-size is {text!r}", "needed a number, numbers with commas, or auto") from None


def _batches(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in between_commas(text)]
    try:
        return {name.strip(): int(size) for name, _, size in pairs}
    except ValueError:
        raise UsageError(
            f"--batch-of is {text!r}", "needed systems with a number each: h2o=128,accelerate=48"
        ) from None


def _capacity(help: str) -> Any:
    help = f"{help}; 6 and 6GiB are the same"
    return option(None, help=help, metavar="SIZE", parse=parse_bytes, unset="no cap")


@dataclass(frozen=True)
class BenchSettings(Checked):
    """The settings of `bench`; UsageError for values that make no sense.

    Fields mean what the flags' help says; besides:

    systems      in the order in which each repetition runs them; "llamacpp" becomes a system per type
    weights      "auto" becomes "checkpoint" where the model has one at hand, else "dummy"
    batch_sizes  one: that of every system; several: tried, in this order; none: tried, doubling
    cpu_mem      bytes that every process is held to, where the machine allows that, and told; of gpu_mem it is told
    """

    systems: tuple[str, ...] = option(
        ("h2o", "full", "transformers"), help=f"systems to run, with commas: {', '.join(NAMES)}", metavar="NAMES"
    )
    llamacpp_types: tuple[str, ...] = option(
        ("q4_0", "q4_k", "f16"),
        help=f"formats that {LLAMACPP} runs with, a system each: {', '.join(LLAMACPP_TYPES)}",
        metavar="TYPES",
    )
    reference: str = option(
        "",
        help="the system to compare with",
        metavar="NAME",
        show=lambda name: name or "the first of ours, else the last",
    )
    model: str = option("opt-125m", "--model", "-m", help="name (opt-125m), folder, or demo")
    weights: Literal["auto", "dummy", "checkpoint"] = option(
        AUTO,
        "--weights",
        "--load-format",
        help="dummy: random, for speed; checkpoint: the same for all, text compared too; auto: whichever is there",
        metavar="KIND",
    )
    batch_sizes: tuple[int, ...] = option(
        (32,),
        "--batch-size",
        "-b",
        help="sequences; 8,16,32 or auto tries several, for a common one and each system's best",
        metavar="N",
        parse=_sizes,
        show=lambda sizes: with_commas(sizes) or AUTO,
    )
    batch_of: dict[str, int] = option(
        dict,
        help="other sizes for some systems, whose best is known from before: h2o=128,accelerate=48",
        metavar="NAME=N,...",
        parse=_batches,
        show=lambda sizes: with_commas(f"{name}={size}" for name, size in sizes.items()) or "none",
    )
    search: bool = option(
        True,
        help="our own rows run by the searched plan, as run does: placement, and with several batch sizes the block; "
        "else by rule, all prompts in one GPU batch",
    )
    prompt_len: Count = option(512, "--prompt-len", "--input-len", "-p", help="tokens per prompt")
    gen_len: Count = option(64, "--gen-len", "--output-len", "-n", help="new tokens per sequence")
    dtype: Literal["bfloat16", "float32", "float16"] = option("bfloat16", help="bfloat16, float32, float16")
    weight_bits: Bits = option(16, help="16, or 8 or 4: our own systems pack their weights while loading")
    model_impl: ModelImpl = option(
        "auto", help="implementation in our own systems: auto, native, transformers, as of run", metavar="IMPL"
    )
    device: Device = option("auto", help="auto, cpu, cuda")
    hh_ratio: Ratio = option(0.2, help="KV budget of h2o as a share of the sequence", metavar="R")
    cpu_mem: int | None = _capacity("host memory of every system")
    gpu_mem: int | None = _capacity("GPU memory of every system")
    repetitions: Count = option(
        3, "--repetitions", "-r", help="runs of all systems in turn, with the runs already in the folder"
    )
    threads: Count = option(usable_threads, help="compute threads of each system")
    seed: Natural = option(0, help="seed of prompts and random weights")
    timeout: float = option(3600.0, help="seconds after which a run is given up", metavar="S")
    search_tokens: Count = option(8, help="new tokens of a run that tries a batch; the rest is projected")
    search_time: float = option(900.0, help="seconds after which a system's batch grows no more", metavar="S")
    only_best: bool = option(False, help="run each system at its best of several batch sizes, and no common one")
    peers: str = option(
        str(PEERS), help="folder of the peers' environments", metavar="DIR", show=lambda _: ".venv-peers"
    )
    scratch_dir: str | None = option(
        None,
        help="folder on the disk for offloaded tensors and random weights, kept for the next comparison",
        metavar="DIR",
        unset="a temporary one",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "systems", tuple(self._one_per_type()))
        if not self.systems:
            raise UsageError("--systems names no system", f"needed names among {', '.join(NAMES)}")
        for name in self.systems:
            SYSTEMS.get(name)
        if len(set(self.systems)) != len(self.systems):
            raise UsageError(f"--systems {','.join(self.systems)} names a system twice", "needed each once")
        if not self.reference:
            chosen = next((name for name in self.systems if SYSTEMS.get(name).own), self.systems[-1])
            object.__setattr__(self, "reference", chosen)
        one_of(self.reference, "--reference", self.systems)
        if self.weights == AUTO:
            object.__setattr__(self, "weights", "checkpoint" if _has_checkpoint(self.model) else "dummy")
        for size in self.batch_sizes:
            whole(size, "--batch-size", 1)
        for name, size in self.batch_of.items():
            one_of(name, "a system of --batch-of", self.systems)
            whole(size, "--batch-of", 1)
        if self.batch_of and self.searches:
            raise UsageError("--batch-of beside several sizes in --batch-size", "needed one size, or a search for all")
        for name in ("timeout", "search_time"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{flag_of(name)} is {getattr(self, name)}", "needed seconds above 0")

    def _one_per_type(self) -> Iterator[str]:
        """The systems, with one for each of llamacpp_types where llama.cpp is named alone."""
        for kind in self.llamacpp_types:
            one_of(kind, "a type of --llamacpp-types", tuple(LLAMACPP_TYPES))
        for name in self.systems:
            if name == LLAMACPP:
                yield from (f"{LLAMACPP}-{kind}" for kind in self.llamacpp_types)
            else:
                yield name

    @property
    def model_name(self) -> str:
        """The model without the folders it is in: for records, which name no machine's paths."""
        return Path(self.model).name or self.model

    @property
    def searches(self) -> bool:
        return len(self.batch_sizes) != 1

    @property
    def plan(self) -> str:
        return "rule" if not self.search else "all" if self.searches or self.batch_of else "placement"

    @property
    def text_reference(self) -> str:
        """The system whose tokens the others' are compared with: ours with the full cache if it is among them."""
        return "full" if "full" in self.systems else self.reference

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without paths of this machine."""
        values = asdict(self)
        for name in ("peers", "scratch_dir", "llamacpp_types"):  # the systems say which types
            del values[name]
        values |= {"systems": list(self.systems), "batch_sizes": list(self.batch_sizes) or AUTO}
        return {**values, "model": self.model_name, "text_reference": self.text_reference}


@dataclass(frozen=True)
class BenchModel:
    """The model's config.json, and the folder of its checkpoint if there is one."""

    config: dict[str, Any]
    folder: Path | None


def _has_checkpoint(name: str) -> bool:
    folder = model_folder(name)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def find_model(settings: BenchSettings) -> BenchModel:
    """A folder, "demo", or a well-known name with random weights. ModelError where it is none of them.

    Asks no network and loads no torch, so that the process that measures the others stays small.
    """
    name, dummy = settings.model, settings.weights == "dummy"
    folder, known = model_folder(name), known_config(name)
    if (folder / "config.json").is_file():
        model = BenchModel(_sized(read_config(folder), folder), None if dummy else folder)
    elif known is None:
        raise unknown_model(name)
    elif not dummy:
        raise ModelError(f"{name} is known by its sizes alone here", "needed the folder of a checkpoint, or demo")
    else:
        model = BenchModel(known, None)
    limit, length = model.config.get("max_position_embeddings"), settings.prompt_len + settings.gen_len
    if isinstance(limit, int) and length > limit:
        raise UsageError(f"--prompt-len and --gen-len make {length} tokens", f"{name} takes {limit}")
    return model


def _sized(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config` with what prompts are made from; ModelError without."""
    if isinstance(config.get("vocab_size"), int):
        return config
    text = config.get("text_config")  # of a model that also looks at images
    if not isinstance(text, dict) or not isinstance(text.get("vocab_size"), int):
        raise ModelError(f"{folder / 'config.json'} has no vocab_size")
    return {**config, "vocab_size": text["vocab_size"]}
