"""Section cost: calibrates the machine, then predicted beside measured throughput for four settings.

As benchmarks.runs does it without a GPU: every run is a process of its own with random weights in bfloat16, its
policy chosen by the search. Here the cap is that of the GPU's memory, and a run is warmed up by its own first tokens.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.section import ONE, Section, module_command, run, serve, timed, tiny_model
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.eviction import EvictionConfig


@dataclass(frozen=True)
class PredictedSetting:
    """A workload; `gpu_mem` as --gpu-mem takes it, "" for all there is; `emulated` for a dry run."""

    model: str
    gpu_mem: str
    sequences: int
    prompt_len: int
    gen_len: int
    ratio: float
    emulated: str = ""

    @property
    def name(self) -> str:
        cap = f" in {self.gpu_mem}" if self.gpu_mem else ""
        work = f"{self.sequences} x {self.prompt_len}+{self.gen_len}"
        cache = "full cache" if self.ratio == 1 else f"H2O {self.ratio:.0%}"
        return f"{Path(self.model).name}{cap}, {work}, {cache}"

    @property
    def machine(self) -> list[str]:
        return ["--model", self.model, "--dtype", "bfloat16", *(["--emulate-gpu", self.emulated] * bool(self.emulated))]

    @property
    def engine(self) -> dict[str, Any]:
        cap = {"emulate_gpu": self.emulated} if self.emulated else {"gpu_mem": self.gpu_mem or None}
        eviction = EvictionConfig() if self.ratio == 1 else EvictionConfig("h2o", ratio=self.ratio)
        return {"model": self.model, "weights": "dummy", "dtype": "bfloat16", "eviction": eviction, **cap}


SETTINGS = (
    PredictedSetting("opt-6.7b", "", 64, 512, 128, 0.2),
    PredictedSetting("opt-6.7b", "", 32, 512, 128, 1.0),
    PredictedSetting("opt-6.7b", "8GiB", 64, 512, 32, 0.2),
    PredictedSetting("opt-6.7b", "16GiB", 64, 512, 32, 1.0),
)


def settings(section: Section) -> tuple[PredictedSetting, ...]:
    if not section.dry_run:
        return SETTINGS
    model = tiny_model(section.output / "tiny-opt")
    return PredictedSetting(model, "", 4, 32, 8, 0.2, "64MiB"), PredictedSetting(model, "", 4, 32, 8, 1.0, "2MiB")


def calibrate(section: Section, setting: PredictedSetting, budget_s: float) -> Path:
    """The profile of this machine for a model, measured once and kept beside the records."""
    path = section.output / f"profile-{Path(setting.model).name}.json"
    if not path.is_file():
        command = [sys.executable, "-m", "h2o_flexgen.calibrate", *setting.machine, "--quiet"]
        run([*command, "--budget-s", str(budget_s), "--output", str(path.resolve())], section.left()).checked()
    return path.resolve()


def measured(section: Section, setting: PredictedSetting) -> Record:
    profile = calibrate(section, setting, 3 if section.dry_run else 40)
    work = {"setting": asdict(setting), "profile": str(profile)}
    record = run(module_command("cost", ONE, work), section.left()).json()
    predicted, found = record["predicted"]["gen_throughput"], record["gen_throughput"]
    kept = ("model", "dtype", "eviction", "policy", "prompt_len", "gen_len", "sequences", "predicted")
    kept += ("prefill_s", "decode_s", "gen_throughput", "bytes_moved", "peak_bytes", "warnings")
    return {
        **{key: record[key] for key in kept},
        "predicted_tokens_per_s": predicted,
        "measured_tokens_per_s": found,
        "error": predicted / found - 1,
        "said": f"predicted {predicted:.4g} tokens/s, measured {found:.4g}",
    }


def one(work: dict[str, Any]) -> Record:
    """The record of one run after a warm-up, planned as `h2o_flexgen.run` plans."""
    setting = PredictedSetting(**work["setting"])
    from h2o_flexgen import LLM
    from h2o_flexgen.cli.prompts import random_prompts
    from h2o_flexgen.config.hardware.profile import HardwareProfile

    hardware = HardwareProfile.load(Path(work["profile"]))
    with LLM(**setting.engine, hardware=hardware) as llm:
        prompts = random_prompts(setting.sequences, setting.prompt_len, llm.model.spec.vocab_size, 0)
        record, _, _ = timed(llm, prompts, setting.gen_len)
    return dict(record.to_json())


def measure(section: Section) -> None:
    for setting in settings(section):
        section.attempt(setting.name, partial(measured, section, setting))


if __name__ == "__main__":
    sys.exit(serve(measure, one))
