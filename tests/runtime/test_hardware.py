"""The kind of a machine."""

from __future__ import annotations

import os
from pathlib import Path

from tiering.runtime.hardware import hardware


def test_processors_and_accelerators_count(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU\nmodel name\t: Fast CPU\n")
    for number in range(2):
        device = tmp_path / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 5\n")
    assert hardware(tmp_path) == f"{os.cpu_count()} Fast CPU; 2 NVIDIA H100"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert hardware(tmp_path / "nothing") == hardware(tmp_path / "nor here")
    assert hardware() == hardware()
