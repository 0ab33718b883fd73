"""Latent attention (MLA): vLLM's CPU kernels cannot start from a prefix, so the connector offers none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.models import write_deepseek
from tests.vllm.rig import engine
from tests.vllm.test_restarts import shutdown_left_overs
from tiering.errors import ConfigError


def test_a_model_whose_kernels_cannot_start_from_a_prefix_is_refused(tmp_path: Path) -> None:
    model = write_deepseek(tmp_path / "deepseek", layers=2)
    options = {"block_size": 16, "num_gpu_blocks_override": 100, "attention_config": {"backend": "CPU_MLA"}}
    try:
        with (
            pytest.raises(ConfigError, match="prefix caching off"),
            engine(model, {"primary": {"capacity": "64MiB"}}, **options),
        ):
            pass
    finally:
        shutdown_left_overs()
