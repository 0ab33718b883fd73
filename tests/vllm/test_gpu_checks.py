"""The checks of servers on a GPU machine, run dry with vLLM's CPU build."""

from __future__ import annotations

import io

import pytest

from benchmarks.gpu.__main__ import main


def test_checks_of_servers_run_dry_and_are_not_reported_as_passed() -> None:
    out = io.StringIO()
    assert main(["--dry", "--only", "synchronous scheduling", "second runner, CUDA graphs", "kills"], out) == 2
    report = out.getvalue()
    ends = [line.split()[0] for line in report.splitlines()[1:-1] if not line.startswith("          ")]
    assert ends == ["dry", "left", "dry"], report
    assert "MB loaded" in report
    assert "all answers equal" in report
    assert "no shared memory and no device memory left" in report


def test_checks_of_small_models_run_dry() -> None:
    out = io.StringIO()
    assert main(["--dry", "--only", "steps, first runner", "steps, full graphs, second runner"], out) == 2
    report = out.getvalue()
    ends = [line.split()[0] for line in report.splitlines()[1:-1] if not line.startswith("          ")]
    assert ends == ["dry", "left"], report
    assert "loads that copy nothing change" in report


@pytest.mark.slow
def test_vllms_own_offloading_gets_blocks_from_our_disk() -> None:
    out = io.StringIO()
    assert main(["--dry", "--only", "inside"], out) == 2
    report = out.getvalue()
    assert report.splitlines()[1].split()[0] == "dry", report
    assert "[192, 192, 192, 192, 192, 192] of 200 tokens" in report
