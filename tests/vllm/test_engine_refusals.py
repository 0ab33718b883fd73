"""Each refusal of the connector is the last line of an engine that does not start.

Each engine has a process of its own, which is forked from one that has imported vLLM. Where a refused model runs on
accelerators only, or a refused vLLM is not the installed one, the engine's process describes a small model so before
the engine starts. What vLLM's configuration refuses before any engine is in ``test_startup.py``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import (
    write_bidirectional,
    write_deepseek,
    write_granite,
    write_llama,
    write_mistral,
    write_prefix_lm,
    write_tokenizer,
    write_whisper,
)
from tests.vllm.rig import engine
from tests.vllm.test_states import CPU, OPTIONS

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
CHANGED = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1 import kv_cache_interface as kinds
create = KVConnectorFactory.create_connector
def described(config, role, kv_cache_config):
    group, words = kv_cache_config.kv_cache_groups[0], dict(block_size=32, num_kv_heads=2, head_size=32, dtype=None)
    {change}
    return create(config, role, kv_cache_config)
KVConnectorFactory.create_connector = described
"""
"""Code that changes the configuration or its first KV-cache group before the connector sees them."""
ALL_STATES = """
    first = next(iter(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()), group.kv_cache_spec)
    object.__setattr__(first, "mamba_cache_mode", "all")
"""
STATES_STAY = """
import tiering.engines.vllm.connector as connector
connector._hands_over_states = lambda: False
"""
NO_REPORTS = """
import tiering.engines.vllm.connector as connector
connector.TransferResults = None
"""
RISC_V = """
    import platform
    platform.machine = lambda: "riscv64"
    config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = False
"""
NOT_INVARIANT = """
    import os
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    os.environ["VLLM_BATCH_INVARIANT"], config.attention_config.backend = "1", AttentionBackendEnum.TRITON_MLA
"""
TWO_SIZES = """
    import copy
    other = copy.deepcopy(group)
    object.__setattr__(other.kv_cache_spec, "block_size", 64)
    kv_cache_config.kv_cache_groups.append(other)
"""
ROOM = {"num_gpu_blocks_override": 300}
"""Options with blocks for the 1500 tokens of a sound."""
CANONICAL = {"layout": "canonical", "secondary": [{"type": "local", "path": "never-opened", "capacity": "64MiB"}]}
MEAN, LONG = {"seq_pooling_type": "MEAN"}, {"max_num_batched_tokens": 640}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def write_deepseek_of_two_layers(directory: Path) -> Path:
    return write_deepseek(directory, layers=2)


def write_embedder(directory: Path) -> Path:
    return write_tokenizer(write_bidirectional(directory))


def write_causal_embedder(directory: Path) -> Path:
    return write_tokenizer(write_llama(directory))


@dataclass(frozen=True, slots=True)
class Refused:
    """A configuration that is refused."""

    message: str
    options: dict[str, Any] = field(default_factory=dict)
    write: Callable[[Path], Path] = write_llama
    words: dict[str, Any] = field(default_factory=dict)
    """Further words of the connector's configuration."""
    before: str = ""
    """Code that the engine's process runs first."""


def states(message: str, before: str = "", words: dict[str, Any] | None = None, **options: Any) -> Refused:
    """Return a refused configuration of a model with states."""
    return Refused(message, {**OPTIONS, **options}, write_granite, words or {}, before)


def changed(message: str, change: str) -> Refused:
    """Return a configuration that is refused after ``change``."""
    return Refused(message, before=CHANGED.format(change=change))


REFUSED = {
    "several hosts": Refused("keep an engine's workers on one host", {"nnodes": 2, "tensor_parallel_size": 2}),
    "pipeline parallelism and drafts": changed(
        "the drafts are computed on the last one; turn one of the two off",
        "config.parallel_config.pipeline_parallel_size, config.speculative_config = 2, object()",
    ),
    "prefill context parallelism": changed(
        "set prefill_context_parallel_size to 1", "config.parallel_config.prefill_context_parallel_size = 2"
    ),
    "latent attention on a CPU": Refused(
        "vLLM turns its own prefix caching off for them",
        {"block_size": 16, "num_gpu_blocks_override": 100, "attention_config": {"backend": "CPU_MLA"}},
        write_deepseek_of_two_layers,
    ),
    "a CPU whose kernels know no prefix": changed("vLLM's kernels for RISC-V start from no KV", RISC_V),
    "results that depend on a prefix": changed("choose another --attention-backend", NOT_INVARIANT),
    "no KV cache": Refused(
        "the model has no KV cache",
        {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False, **LONG},
        write_embedder,
    ),
    "attention that is not causal": Refused("the KV of a prompt's beginning depends on its end", write=write_prefix_lm),
    "pooling over all tokens": Refused(
        "the model's pooling needs the result of every token",
        {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False, "pooler_config": MEAN, **LONG},
        write_causal_embedder,
    ),
    "cross attention": Refused(
        "its KV belongs to the encoder's input instead of tokens",
        {"skip_tokenizer_init": False, "max_model_len": 64, "max_num_batched_tokens": 2048, **ROOM},
        write_whisper,
    ),
    "mode simple without full attention": Refused(
        "mode simple needs a KV-cache group with full attention", write=write_mistral, words={"mode": "simple"}
    ),
    "mode simple and decode context parallelism": Refused(
        "mode simple: context-parallel sizes of 2 in all are not supported; use mode tiering",
        words={"mode": "simple"},
        before=CHANGED.format(change="config.parallel_config.decode_context_parallel_size = 2"),
    ),
    "unknown kind": changed(
        "KV-cache group 0 (unknown, model.layers.0.self_attn.attn, ...): its kind is not known",
        "group.kv_cache_spec = kinds.AttentionSpec(**words)",
    ),
    "no hashes": changed(
        "the model's KV cache (unknown) have no hashes", "group.kv_cache_spec = kinds.CircularBufferSpec(**words)"
    ),
    "host memory": changed("lives in host memory, and a hit needs its blocks too", "group.host_resident = True"),
    "reference sliding window": changed(
        "KV-cache group 0 (reference sliding window)", "group.kv_cache_spec = kinds.RSWASpec(rswa_window=8, **words)"
    ),
    "several groups in an old vLLM": Refused(
        "the model has 2 KV-cache groups, and this vLLM cannot handle failed loads of such models",
        before=NO_REPORTS + CHANGED.format(change="kv_cache_config.kv_cache_groups.append(group)"),
    ),
    "states without prefix caching": states("set --enable-prefix-caching", enable_prefix_caching=False),
    "states at all blocks": states(
        "--mamba-cache-mode all is not supported",  # vLLM 0.32 has no such mode any more
        before=CHANGED.format(change=ALL_STATES),
    ),
    "states and drafts": states("turn one of the two off", speculative_config=NGRAM),
    "states in larger blocks": states("keeps one state per GPU block; leave both out", words={"blocks_per_chunk": 2}),
    "states that are not whole": states(
        "ReplaySSM does not keep whole states",
        before=CHANGED.format(change="config.cache_config.use_replayssm = True"),
    ),
    "canonical rows of states": states("of the kind mamba, which has no KV heads; set layout: plain", words=CANONICAL),
    "states that an old vLLM keeps": states("use vLLM 0.32 or newer", before=STATES_STAY),
    "one size of larger blocks for groups with blocks of several sizes": Refused(
        "set blocks_per_chunk, the number of GPU blocks in an offloaded block of each group",
        before=CHANGED.format(change=TWO_SIZES),
        words={"block_size": 64},
    ),
    "block hashes that no other process has": Refused(
        "are seeded at random in each process",
        {"prefix_caching_hash_algo": "xxhash"},
        words={"secondary": CANONICAL["secondary"]},
        before='import os; os.environ.pop("PYTHONHASHSEED", None)',
    ),
}


SLOW = {
    *(
        "prefill context parallelism",
        "pipeline parallelism and drafts",
        "a CPU whose kernels know no prefix",
        "results that depend on a prefix",
        "mode simple and decode context parallelism",
        "unknown kind",
        "no hashes",
        "several groups in an old vLLM",
    ),
    *("states at all blocks", "states that are not whole", "states that an old vLLM keeps"),
    "one size of larger blocks for groups with blocks of several sizes",
}
"""Refusals of a described engine that are tested without an engine too."""


def start(refused: Refused, model: Path, errors: Path) -> None:
    """Start the refused engine, in a process whose errors go to a file."""
    with errors.open("w") as output:
        os.dup2(output.fileno(), 2)
    exec(refused.before, {})
    with engine(model, {**CPU, **refused.words}, **refused.options):
        pass


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in REFUSED]
)
def test_an_engine_that_cannot_work_ends_with_the_reason(tmp_path: Path, name: str) -> None:
    refused = REFUSED[name]
    model = refused.write(tmp_path / "model")
    process = FORKS.Process(target=start, args=(refused, model, tmp_path / "errors"))
    process.start()
    process.join(600)
    code = process.exitcode
    process.kill()
    assert code not in (None, 0)
    assert refused.message in (tmp_path / "errors").read_text().strip().splitlines()[-1]
