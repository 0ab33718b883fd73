"""Benchmarks with the real vLLM (its environment is .venv-vllm): ``python -m benchmarks.vllm_bench [--quick] [--only
ttft|cpu]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.runner import run
from tests.vllm.rig import prepare_environment

MODULES = {"ttft": "vllm_ttft", "cpu": "vllm_cpu"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code says whether both ran (and, with --strict, reached their targets)."""
    prepare_environment()
    return run("python -m benchmarks.vllm_bench", "Run the benchmarks with the real vLLM.", MODULES, argv)


if __name__ == "__main__":
    sys.exit(main())
