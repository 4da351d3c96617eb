"""The processor's name, by texts of /proc/cpuinfo as Linux has them and of lscpu."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from h2o_flexgen.config.reports.record import host_facts
from h2o_flexgen.processor import processor_name

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14\n\nprocessor\t: 1\n"


ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
TWO_KINDS = "Vendor ID:   ARM\n  Model name:   Cortex-A55\n  Model name:   Cortex-A76\n  Model name:   Cortex-A76\n"


@pytest.mark.parametrize(
    ("text", "listed", "name"),
    [
        (X86, "Model name:  another\n", "AMD EPYC 9R14"),
        (ARM, "Vendor ID:     ARM\nModel name:    Neoverse-N1\nModel:   1\n", "ARM Neoverse-N1"),
        (ARM, TWO_KINDS, "ARM Cortex-A55 + Cortex-A76"),
        (ARM, "Vendor ID:    0x99\nModel name:   -\n", "riscv64"),
        (ARM, "", "riscv64"),
        (ARM, None, "riscv64"),
        (None, None, "riscv64"),
    ],
)
def test_a_processor_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, listed: str | None, name: str
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    if listed is not None:
        program = tmp_path / "lscpu"
        program.write_text(f"#!/bin/sh\n/bin/cat << END\n{listed}END\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor_name(path) == name


def test_records_have_it() -> None:
    assert host_facts()["cpu"] == processor_name()
