"""The checks of servers on a GPU machine, run dry with vLLM's CPU build."""

from __future__ import annotations

import io

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
