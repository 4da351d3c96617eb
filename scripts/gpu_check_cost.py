"""Section cost: calibrates the machine, then predicted beside measured throughput for four settings.

As scripts/cost_check.py does it without a GPU: every run is a process of its own with random weights in bfloat16, its
policy chosen by the search. Here the cap is that of the GPU's memory, and a run is warmed up by its own first tokens.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_check_records import ROOT, Failed, Section, run, run_json, section_arguments, tiny_model
from gpu_check_warm import warm_up

from h2o_flexgen.config.eviction import EvictionConfig

CHILD = "one"


@dataclass(frozen=True)
class Setting:
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
        """For records and tables."""
        cap = f" in {self.gpu_mem}" if self.gpu_mem else ""
        work = f"{self.sequences} x {self.prompt_len}+{self.gen_len}"
        cache = "full cache" if self.ratio == 1 else f"H2O {self.ratio:.0%}"
        return f"{Path(self.model).name}{cap}, {work}, {cache}"

    @property
    def machine(self) -> list[str]:
        """Flags of a calibration."""
        return ["--model", self.model, "--dtype", "bfloat16", *(["--emulate-gpu", self.emulated] * bool(self.emulated))]

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's settings."""
        cap = {"emulate_gpu": self.emulated} if self.emulated else {"gpu_mem": self.gpu_mem or None}
        eviction = EvictionConfig() if self.ratio == 1 else EvictionConfig("h2o", ratio=self.ratio)
        return {"model": self.model, "weights": "dummy", "dtype": "bfloat16", "eviction": eviction, **cap}


SETTINGS = (
    Setting("opt-6.7b", "", 64, 512, 128, 0.2),
    Setting("opt-6.7b", "", 32, 512, 128, 1.0),
    Setting("opt-6.7b", "8GiB", 64, 512, 32, 0.2),
    Setting("opt-6.7b", "16GiB", 64, 512, 32, 1.0),
)


def settings(section: Section) -> tuple[Setting, ...]:
    """What is measured."""
    if not section.dry_run:
        return SETTINGS
    model = tiny_model(section.output / "tiny-opt")
    return Setting(model, "", 4, 32, 8, 0.2, "64MiB"), Setting(model, "", 4, 32, 8, 1.0, "2MiB")


def calibrate(section: Section, setting: Setting, budget_s: float) -> Path:
    """The profile of this machine for a model, measured once and kept beside the records."""
    path = section.output / f"profile-{Path(setting.model).name}.json"
    if not path.is_file():
        command = [sys.executable, "-m", "h2o_flexgen.calibrate", *setting.machine, "--quiet"]
        run([*command, "--budget-s", str(budget_s), "--output", str(path.resolve())], section.left())
    return path.resolve()


def measure(section: Section, setting: Setting) -> None:
    """One run, recorded."""
    try:
        profile = calibrate(section, setting, 3 if section.dry_run else 40)
        text = json.dumps({"setting": asdict(setting), "profile": str(profile)})
        record = run_json([sys.executable, str(ROOT / "scripts/gpu_check_cost.py"), CHILD, text], section.left())
    except Failed as error:
        section.keep(setting.name, failed=str(error))
        return
    predicted, found = record["predicted"]["gen_throughput"], record["gen_throughput"]
    kept = ("model", "dtype", "eviction", "policy", "prompt_len", "gen_len", "sequences", "predicted")
    kept += ("prefill_s", "decode_s", "gen_throughput", "bytes_moved", "peak_bytes", "warnings")
    section.keep(
        setting.name,
        **{key: json.loads(json.dumps(record[key])) for key in kept},
        predicted_tokens_per_s=predicted,
        measured_tokens_per_s=found,
        error=predicted / found - 1,
        said=f"predicted {predicted:.4g} tokens/s, measured {found:.4g}",
    )


def child(text: str) -> int:
    """One run after a warm-up, in a process of its own, planned as `h2o_flexgen.run` plans; prints its record."""
    work = json.loads(text)
    setting = Setting(**work["setting"])
    from h2o_flexgen import LLM
    from h2o_flexgen.cli.planning import Planning
    from h2o_flexgen.cli.prompts import random_prompts
    from h2o_flexgen.config.hardware.profile import HardwareProfile

    hardware = HardwareProfile.load(Path(work["profile"]))
    with LLM(**setting.engine) as llm:
        prompts = random_prompts(setting.sequences, setting.prompt_len, llm.model.spec.vocab_size, 0)
        llm.planner = Planning(llm, hardware, calibrate=False, quiet=True)
        warm_up(llm, prompts, setting.gen_len)
        planning = Planning(llm, hardware, calibrate=False, quiet=True)
        llm.planner, llm.on_plan = planning, planning.announce
        llm.generate(prompts, max_new_tokens=setting.gen_len, ignore_eos=True)
        record = llm.last_record
    if record is None:
        raise Failed("the run left no record")
    print(planning.completed(record, setting.prompt_len, setting.gen_len).to_line())
    return 0


def main() -> int:
    """Runs the section; 0 whatever failed, since the records say so."""
    if sys.argv[1:2] == [CHILD]:
        return child(sys.argv[2])
    section = section_arguments("cost")
    for setting in settings(section):
        if section.wanted(setting.name):
            measure(section, setting)
    return 0


if __name__ == "__main__":
    sys.exit(main())
