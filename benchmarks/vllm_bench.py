"""Benchmarks with the real vLLM: ``python -m benchmarks.vllm_bench [--quick] [--only NAME]``.

Their environment is .venv-vllm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.runner import run
from tests.vllm.rig import prepare_environment

MODULES = {
    "ttft": "vllm_ttft",
    "cpu": "vllm_cpu",
    "small": "vllm_small",
    "files": "vllm_files",
    "burst": "vllm_burst",
    "overhead": "vllm_overhead",
    "load_or_compute": "vllm_load_or_compute",
    "tier": "vllm_tier",
    "lmcache": "lmcache_l2",
    "waiting": "vllm_waiting",
    "warm": "vllm_warm_start",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks, and return an exit code as :func:`benchmarks.runner.run` does."""
    prepare_environment()
    return run("python -m benchmarks.vllm_bench", "Run the benchmarks with the real vLLM.", MODULES, argv)


if __name__ == "__main__":
    sys.exit(main())
