"""The processor's name: Linux has it in words on x86, and as the numbers of its maker on ARM. Standard library only."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MAKERS = {
    0x41: "ARM", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon",
    0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple", 0xC0: "Ampere",
}  # fmt: skip
_PARTS = {
    0x41: {
        0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72",
        0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77",
        0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510",
        0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD49: "Neoverse-N2", 0xD4B: "Cortex-A78C", 0xD4D: "Cortex-A715",
        0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4",
        0xD84: "Neoverse-V3", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725", 0xD8E: "Neoverse-N3",
    },
    0x46: {0x001: "A64FX"},
    0x48: {0xD01: "TaiShan-v110"},
    0x4E: {0x003: "Denver 2", 0x004: "Carmel"},
    0xC0: {0xAC3: "Ampere-1", 0xAC4: "Ampere-1a"},
}  # fmt: skip
"""Names of kinds of cores, as `lscpu` has them, of servers and boards: others are told by their numbers."""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The name of the processor, or of its cores where there are several kinds, with the board if Linux knows it;
    `platform` is asked where Linux says nothing."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in text.splitlines())]
    words = next((value for name, value in fields if name == "model name"), None)
    return words or _by_numbers(fields) or platform.processor() or platform.machine()


def _by_numbers(fields: list[tuple[str, str]]) -> str:
    """Of a text that has a maker and a part for each core; empty of any other."""
    makers = [value for name, value in fields if name == "CPU implementer"]
    parts = [value for name, value in fields if name == "CPU part"]
    cores = " + ".join(dict.fromkeys(_core(*each) for each in zip(makers, parts, strict=False)))
    board = next((value for name, value in fields if name == "Model"), "")
    return f"{cores} ({board})" if cores and board else cores


def _core(maker: str, part: str) -> str:
    try:
        made, kind = int(maker, 0), int(part, 0)
    except ValueError:
        return f"maker {maker} part {part}"
    name = _PARTS.get(made, {}).get(kind, f"part {kind:#05x}")
    by = _MAKERS.get(made, f"maker {made:#04x}")
    return name if name.startswith(by) else f"{by} {name}"
