"""The processor's name, by texts of /proc/cpuinfo as Linux has them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from h2o_flexgen.config.reports.record import host_facts
from h2o_flexgen.processor import processor_name

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14\n\nprocessor\t: 1\n"


def arm(implementer: str, part: str, core: int = 0) -> str:
    """One core of a 64-bit ARM processor."""
    return (
        f"processor\t: {core}\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd\nCPU implementer\t: {implementer}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "AMD EPYC 9R14"),
        (arm("0x41", "0xd0c") + arm("0x41", "0xd0c", 1), "ARM Neoverse-N1"),
        (arm("0x41", "0xd05") + arm("0x41", "0xd0b", 1), "ARM Cortex-A55 + ARM Cortex-A76"),
        (arm("0x41", "0xd0b") + "Model\t\t: Raspberry Pi 5\n", "ARM Cortex-A76 (Raspberry Pi 5)"),
        (arm("0xc0", "0xac3"), "Ampere-1"),
        (arm("0x41", "0xfff"), "ARM part 0xfff"),
        (arm("0x99", "0x001"), "maker 0x99 part 0x001"),
        (arm("new", "newer"), "maker new part newer"),
    ],
)  # fmt: skip
def test_a_processor_has_a_name(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert processor_name(path) == name


@pytest.mark.parametrize("text", ["", "cpu\t: POWER9\n", "Model\t: a board\n", None])
def test_where_linux_says_nothing_platform_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor_name(path) == "riscv64"


def test_records_have_it() -> None:
    assert host_facts()["cpu"] == processor_name()
