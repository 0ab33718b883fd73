"""Checks of a small model in vLLM's server, with both model runners and the features that touch KV."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.checks import Check, NotHereError, require
from benchmarks.gpu.machine import Machine
from tests.vllm.models import write_draft, write_gemma, write_llama
from tests.vllm.rig import Answer, prepare_environment, prompt, transfer_config
from tests.vllm.server import Server, serve, until
from tiering.primary.memory.region import FILE_PREFIX, SHM

STACK: dict[str, object] = {"mode": "tiering", "primary": {"capacity": "1GiB"}}
PROMPTS = 8
PROMPT_TOKENS = 400
NEW_TOKENS = 64
PATIENCE_SECONDS = 600.0
"""Longest wait for an event that must come, in seconds.

On a machine that does other work, a step takes long.
"""
MOST_SLOWDOWN = 1.1
"""Largest inter-token latency (p99) with tiers, as a multiple of the latency without."""

_GRAPHS = ("--no-enforce-eager", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(256 << 20))
_UNCOMPILED = json.dumps({"mode": 0, "cudagraph_mode": "FULL"})
"""Graphs of whole steps, without torch.compile."""
_FIRST, _SECOND = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to start the server."""

    name: str
    """Name for the report."""
    model: str = "llama"
    """The kind of model: llama, gemma (sliding windows) or speculative (llama with a draft model)."""
    options: tuple[str, ...] = ()
    """Further options of the server."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further environment variables."""
    gpu_only: bool = False
    """True if vLLM's CPU build cannot start the server like that; a dry run leaves the check out."""


VARIANTS = (
    Variant("first runner, eager", options=("--enforce-eager",), environment=tuple(_FIRST.items())),
    Variant("first runner, CUDA graphs", environment=tuple(_FIRST.items()), gpu_only=True),
    Variant("second runner, CUDA graphs", environment=tuple(_SECOND.items()), gpu_only=True),
    Variant("full CUDA graphs", options=("--compilation-config", _UNCOMPILED), gpu_only=True),
    Variant("asynchronous scheduling", options=("--async-scheduling",)),
    Variant("synchronous scheduling", options=("--no-async-scheduling",)),
    Variant("speculative decoding", model="speculative"),
    Variant("fp8 KV", options=("--kv-cache-dtype", "fp8")),
    Variant("sliding windows", model="gemma"),
)
"""The ways to start the server; each one is a check."""


def outputs(variant: Variant, machine: Machine) -> str:
    """Compare answers with and without tiers, and the latencies between tokens.

    A dry run asks vLLM's CPU build less, and does not judge the latencies.
    """
    _needs_vllm(machine, gpu_only=variant.gpu_only)
    count, tokens = machine.sized(PROMPTS, 2), machine.sized(NEW_TOKENS, 8)
    prompts, others = ([prompt(first + seed, PROMPT_TOKENS) for seed in range(count)] for first in (0, 1000))
    with tempfile.TemporaryDirectory() as scratch:
        options = _options(variant, Path(scratch), machine)
        with _server(variant, Path(scratch), None, options) as server:
            _answers(server, prompts, tokens)  # compiles
            server.reset()
            expected, bare = _answers(server, prompts, tokens)
        with _server(variant, Path(scratch), STACK, options) as server:
            _answers(server, others, tokens)
            until(lambda: server.stored() > 0, PATIENCE_SECONDS, "a store")
            before = server.stored()
            stored, with_stores = _answers(server, prompts, tokens)
            until(lambda: server.stored() > before, PATIENCE_SECONDS, "a store of what is loaded afterwards")
            server.evict()
            loaded, with_loads = _answers(server, prompts, tokens)
            moved = server.loaded()
    most = MOST_SLOWDOWN if machine.is_gpu else math.inf
    return judge(expected, stored, loaded, moved, bare, [*with_stores, *with_loads], most)


def judge(
    expected: Sequence[Answer],
    stored: Sequence[Answer],
    loaded: Sequence[Answer],
    moved: float,
    bare: Sequence[float],
    tiered: Sequence[float],
    most: float = MOST_SLOWDOWN,
) -> str:
    """Return the measurements of a server, or raise.

    Args:
        expected: answers without tiers.
        stored: answers while blocks were stored.
        loaded: answers after blocks were loaded.
        moved: bytes that were loaded.
        bare: seconds between tokens without tiers.
        tiered: seconds between tokens with tiers.
        most: largest p99 with tiers, as a multiple of the p99 without; default 1.1.
    """
    for name, answers in (("stores", stored), ("loads", loaded)):
        wrong = [number for number, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.tokens != b.tokens]
        require(not wrong, f"answers {wrong} differ with {name}")
    require(moved > 0, "nothing was loaded, so equal answers prove nothing")
    before, after = (float(np.percentile(times, 99)) for times in (bare, tiered))
    ratio = after / before
    measured = f"{moved / 1e6:.0f} MB loaded; p99 between tokens {before * 1e3:.2f} ms without, {after * 1e3:.2f} with"
    require(ratio <= most, f"{measured}: {ratio:.2f} times as long, at most {most} is allowed")
    return f"{measured}; all answers equal"


def kills(machine: Machine) -> str:
    """Kill a server in the middle of stores, and look for what it left in shared memory."""
    _needs_vllm(machine)
    variant = Variant("kill")
    with tempfile.TemporaryDirectory() as scratch:
        engine_id, free = f"killed-{uuid.uuid4()}", machine.free()
        transfers = json.dumps({**transfer_config(STACK), "engine_id": engine_id})
        options = (*_options(variant, Path(scratch), machine), "--kv-transfer-config", transfers)
        with _server(variant, Path(scratch), None, options) as server:
            stream = server.stream([prompt(1, PROMPT_TOKENS)], NEW_TOKENS)
            next(stream)
            server.end(signal.SIGKILL)
        require(not (left := shared_files(engine_id)), f"the killed server has left {left} in {SHM}")
        until(lambda: machine.free() >= free - (64 << 20), PATIENCE_SECONDS, "the return of the device memory")
    return "no shared memory and no device memory left"


def shared_files(engine_id: str) -> list[str]:
    """Return the names of one engine's regions in /dev/shm.

    Other servers that start at the same time have some too.
    """
    return sorted(path.name for path in SHM.glob(f"{FILE_PREFIX}{engine_id}*"))


def _needs_vllm(machine: Machine, *, gpu_only: bool = False) -> None:
    if gpu_only and not machine.is_gpu:
        raise NotHereError("it needs a GPU")
    if importlib.util.find_spec("vllm") is None:
        raise NotHereError("it needs vLLM in this environment")
    if machine.is_gpu:
        os.environ["TRITON_F32_DEFAULT"] = "ieee"  # products of float32 in attention, which are of TF32 otherwise
    else:
        prepare_environment()


def _options(variant: Variant, scratch: Path, machine: Machine) -> tuple[str, ...]:
    """Write the variant's model into ``scratch``, and return the server's options."""
    base = _GRAPHS if machine.is_gpu else ()
    model = scratch / "model"
    if variant.model == "gemma":
        write_gemma(model)
    else:
        write_llama(model)
    if variant.model == "speculative":
        draft = write_draft(scratch / "draft", model, 0.01)
        config = {"model": str(draft), "num_speculative_tokens": 3}
        return (*base, *variant.options, "--speculative-config", json.dumps(config))
    return (*base, *variant.options)


@contextmanager
def _server(
    variant: Variant, scratch: Path, stack: dict[str, object] | None, options: tuple[str, ...]
) -> Iterator[Server]:
    with serve(scratch / "model", stack, scratch / "log", *options, **dict(variant.environment)) as server:
        yield server


def _answers(server: Server, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[Answer], list[float]]:
    """Return the answers to ``prompts``, one after the other, and the seconds between their tokens."""
    answers, times = [], []
    for tokens in prompts:
        last = None
        for found in server.stream([tokens], max_tokens):
            now = time.perf_counter()
            if last is not None:
                times.append(now - last)
            last = now
            answer = found[0]
        answers.append(answer)
    return answers, times


def checks() -> tuple[Check, ...]:
    """Return a check for each variant, and the check of kills."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    claim = "answers are equal, and tokens are not late"
    found = [Check(variant.name, claim, partial(outputs, variant)) for variant in VARIANTS]
    return (*found, Check("kills", "a killed server leaves nothing behind", kills))
