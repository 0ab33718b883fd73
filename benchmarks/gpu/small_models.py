"""Checks of small models in the real vLLM, each engine inside a process of the check's own.

They show what vLLM's CPU build cannot: loads within the step in front of CUDA graphs, vLLM's own offloading with our
tier behind it, adapters, and the start with a large CPU tier.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.checks import Check, NotHereError, require
from benchmarks.gpu.machine import Machine
from benchmarks.vllm_own import compile_copy, install
from tests.vllm.handlers import CopyNothing
from tests.vllm.models import write_adapter, write_gemma, write_llama
from tests.vllm.rig import BLOCK, Answer, Engine, answers_without_tiers, engine, prepare_environment, prompt, wrong

Found = TypeVar("Found")
PATIENCE_SECONDS = 400.0
"""Longest time of one process of a check, in seconds."""
LONG, SMALL = 3, 24
"""Prompts whose answers are long, and those that come beside them, a few in each step."""
AT_ONCE = 3
LONG_TOKENS = 60
ROUNDS = 4
POOL = 64
"""GPU blocks: fewer than those that overwrite them in :meth:`tests.vllm.rig.Engine.evict`."""
STACK: dict[str, Any] = {"primary": {"capacity": "64MiB"}}
_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_FIRST, _SECOND = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
_COMPILES = {"TORCHDYNAMO_DISABLE": "0"}


def graphs(kind: str, *, compiled: bool = False) -> dict[str, Any]:
    """Return vLLM's options for CUDA graphs of a kind, with or without torch.compile."""
    words = {"mode": 3 if compiled else 0, "cudagraph_mode": kind, "cudagraph_capture_sizes": _SIZES}
    return {"enforce_eager": False, "compilation_config": words}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run an engine in which small hits are loaded within steps."""

    name: str
    """Name for the report."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    stack: dict[str, Any] = field(default_factory=dict)
    """Words of the stack."""
    has_disk: bool = False
    """True if a disk is behind the CPU tier."""
    write: Callable[[Path], Path] = write_llama
    """Writes the model."""
    gpu_only: bool = False
    """True if vLLM's CPU build cannot run so."""


_ASYNC = {"async_scheduling": True}
WAYS = (
    Way("steps, first runner", _ASYNC, _FIRST),
    Way("steps, second runner", _ASYNC, _SECOND, gpu_only=True),
    Way("steps, synchronous", {"async_scheduling": False}),
    Way("steps, simple", _ASYNC, stack={"mode": "simple"}),
    Way("steps, windows", _ASYNC, write=write_gemma),
    Way("steps, canonical rows", _ASYNC, stack={"layout": "canonical"}, has_disk=True),
    Way("steps, full graphs, first runner", _ASYNC | graphs("FULL"), _FIRST, gpu_only=True),
    Way("steps, full graphs, second runner", _ASYNC | graphs("FULL"), _SECOND, gpu_only=True),
    Way("steps, full graphs, simple", _ASYNC | graphs("FULL"), stack={"mode": "simple"}, gpu_only=True),
    Way("steps, piecewise graphs", _ASYNC | graphs("PIECEWISE", compiled=True), _FIRST | _COMPILES, gpu_only=True),
    Way(
        "steps, full and piecewise graphs",
        _ASYNC | graphs("FULL_AND_PIECEWISE", compiled=True),
        _SECOND | _COMPILES,
        gpu_only=True,
    ),
)
"""The ways to run engines; each one is a check."""


def steps(way: Way, machine: Machine) -> str:
    """Compare answers of many small hits, loaded within steps beside requests with long answers."""
    _needs_vllm(machine, gpu_only=way.gpu_only)
    return _alone(partial(_steps, way, machine.sized(ROUNDS)), way.environment)


def _steps(way: Way, rounds: int) -> str:
    options = {"num_gpu_blocks_override": POOL, **way.options}
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as scratch:
        model = way.write(Path(scratch) / "model")
        long = [prompt(seed) for seed in range(LONG)]
        small = [prompt(100 + seed, 3 * BLOCK + 24) for seed in range(SMALL)]
        expected = [
            *answers_without_tiers(model, long, LONG_TOKENS, **options),
            *answers_without_tiers(model, small, **options),
        ]
        stack = STACK | way.stack | ({"secondary": [_disk(scratch)]} if way.has_disk else {})
        with engine(model, stack, **options) as running:
            require(wrong(_storm(running, long, small), expected) == [], "answers differ while blocks are stored")
            before, moved = _within_steps(running), running.moved.get("cpu_to_gpu", 0)
            for number in range(rounds):
                running.evict()
                differing = wrong(_storm(running, long, small), expected)
                require(differing == [], f"answers {differing} differ in round {number}")
            loads, moved = _within_steps(running) - before, running.moved.get("cpu_to_gpu", 0) - moved
            require(loads >= rounds * SMALL // 2, f"only {loads} of {rounds * SMALL} small hits came within steps")
            running.evict()
            before = _within_steps(running)
            with running.loads_through(CopyNothing, within_steps=True):
                control = wrong(_storm(running, long, small), expected)
            lied = _within_steps(running) - before
            require(running.llm.reset_prefix_cache(), "vLLM did not reset its cache")
            require(len(control) >= lied // 2 > 0, f"{lied} loads copied nothing, and only answers {control} differ")
    return (
        f"{rounds} rounds of {SMALL} small hits beside {LONG} long answers: {loads} loads within steps, "
        f"{moved / 1e6:.1f} MB, all answers equal; {lied} loads that copy nothing change {len(control)} answers"
    )


def _disk(scratch: str) -> dict[str, Any]:
    return {"type": "local", "path": f"{scratch}/kv", "capacity": "256MiB"}


def _storm(running: Engine, long: Sequence[list[int]], small: Sequence[list[int]]) -> list[Answer]:
    """Return the answers to the long requests, and to the small ones that come meanwhile."""
    first = running.start(long, LONG_TOKENS)
    names: list[str] = []
    for at in range(0, len(small), AT_ONCE):
        for _ in range(3):
            running.step()
        names += running.start(small[at : at + AT_ONCE])
    return running.finish([*first, *names])


def _within_steps(running: Engine) -> int:
    return int(running.connector.scheduler_half.get_stats()["connector"]["loads_within_step"])


ADAPTERS = 2


def adapters(machine: Machine) -> str:
    """Compare adapters' answers from the CPU tier and a disk with those from the engine's own cache."""
    _needs_vllm(machine)
    return _alone(_adapters, {})


def _adapters() -> str:
    options = {"dtype": "bfloat16", "enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}
    prompts = [prompt(seed) for seed in range(2)]
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as scratch:
        model = write_llama(Path(scratch) / "model")
        paths = [write_adapter(Path(scratch) / f"adapter {number}", number) for number in range(ADAPTERS)]
        stack = STACK | {"secondary": [_disk(scratch)]}
        own: dict[int, list[Answer]] = {}
        with engine(model, stack, **options) as running:
            for number in (-1, *range(ADAPTERS)):
                _one_by_one(running, prompts, paths, number)
                own[number], loaded = running.loaded(partial(_one_by_one, running, prompts, paths, number))
                require(loaded == 0, "the engine's own cache did not have the prompts")
                running.evict()
            require(len({repr(answers) for answers in own.values()}) == len(own), "adapters do not change the answers")
            for number, answers in own.items():
                found, loaded = running.loaded(partial(_one_by_one, running, prompts, paths, number))
                require(found == answers and loaded > 0, f"adapter {number}: {loaded} bytes from the CPU tier, {found}")
                running.evict()
        gc.collect()
        with engine(model, stack, **options) as running:
            for number in range(ADAPTERS):  # the worker reads and reports the adapter
                _one_by_one(running, [prompt(50, 8)], paths, number)
            for number, answers in own.items():
                found, loaded = running.loaded(partial(_one_by_one, running, prompts, paths, number))
                require(found == answers and loaded > 0, f"adapter {number}: {loaded} bytes from the disk, {found}")
                running.evict()
    return f"bfloat16, {ADAPTERS} adapters and none: from the CPU tier and the disk, tokens and logarithms equal"


def _one_by_one(running: Engine, prompts: Sequence[list[int]], paths: Sequence[Path], number: int) -> list[Answer]:
    from vllm.lora.request import LoRARequest

    lora = None if number < 0 else LoRARequest(f"adapter-{number}", number + 1, str(paths[number]))
    return [running.ask([tokens], lora=lora)[0] for tokens in prompts]


OWN_TIER_BYTES = 64 << 20


def inside(machine: Machine) -> str:
    """Compare answers of vLLM's own offloading, with our tier behind it, before and after a restart."""
    _needs_vllm(machine)
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as scratch:
        copies = None if machine.is_gpu else compile_copy(Path(scratch))
        model, other = (str(write_llama(Path(scratch) / f"model {seed}", seed)) for seed in range(2))
        disk = str(Path(scratch) / "kv")
        own, _ = _alone(partial(_inside, copies, model, disk, first=True), {})
        found, cached = _alone(partial(_inside, copies, model, disk), {})
        require(found == own, "answers differ from those with the engine's own cache")
        require(min(cached) > 0, f"{cached} tokens were cached after the restart")
        _, theirs = _alone(partial(_inside, copies, other, disk), {})
        require(max(theirs) == 0, f"another model got {theirs} tokens")
        for file in Path(disk).rglob("*"):
            if file.is_file() and file.stat().st_size > 1 << 20:
                data = bytearray(file.read_bytes())
                data[8192::512] = bytes(byte ^ 0xFF for byte in data[8192::512])
                file.write_bytes(data)
        damaged, left = _alone(partial(_inside, copies, model, disk), {})
        require(max(left) == 0, f"{left} tokens came from damaged blocks")
        require([a.tokens for a in damaged] == [a.tokens for a in own], "answers differ with a damaged disk")
    return f"{cached} of {INSIDE_TOKENS} tokens of each prompt from the disk after a restart; none from damaged blocks"


INSIDE_TOKENS = 200


def _inside(copies: Path | None, model: str, disk: str, *, first: bool = False) -> tuple[list[Answer], list[int]]:
    """Return the answers of one engine, and the tokens of each prompt that it did not compute.

    Args:
        copies: library in the place of vLLM's copies; None: they need none, on a GPU.
        first: True to ask everything twice, and to return what the engine's own cache gave; default: False.
    """
    from vllm import LLM, SamplingParams

    if copies is not None:
        install(copies)
    tier = {
        "type": "KVTieringTier",
        "module_path": "tiering.engines.vllm_tier",
        "primary": {"capacity": OWN_TIER_BYTES},
        "secondary": [{"type": "local", "path": disk, "capacity": "1GiB", "segment_size": "4MiB"}],
    }
    words = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": OWN_TIER_BYTES, "secondary_tiers": [tier]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": words}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=640,
        gpu_memory_utilization=0.05,
        num_gpu_blocks_override=POOL,
        kv_cache_memory_bytes=256 << 20 if copies is None else None,
        kv_transfer_config=transfer,
    )
    core = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)
    try:
        _wait_for_the_disk(llm, core.scheduler.connector.scheduler.manager.secondary_tiers[0])
        for _ in range(2 if first else 1):
            outputs = [
                llm.generate([{"prompt_token_ids": prompt(seed, INSIDE_TOKENS)}], sampling, use_tqdm=False)[0]
                for seed in range(6)
            ]
        end = time.monotonic() + 30
        while core.scheduler.has_requests() and time.monotonic() < end:
            llm.llm_engine.step()
        answers = [_answer(output.outputs[0]) for output in outputs]
        return answers, [output.num_cached_tokens or 0 for output in outputs]
    finally:
        core.shutdown()


def _wait_for_the_disk(llm: Any, tier: Any) -> None:
    """Make steps until the tier knows the weights, because it uses no disk before."""
    from vllm import SamplingParams

    end = time.monotonic() + PATIENCE_SECONDS
    while not tier._thread.stats.get("tiers", {}).get("local", {}).get("writable"):
        require(time.monotonic() < end, "the tier's disk cannot be written to")
        llm.generate([{"prompt_token_ids": prompt(99, 8)}], SamplingParams(max_tokens=1, detokenize=False))


def _answer(output: Any) -> Answer:
    tokens = list(output.token_ids)
    return Answer(tokens, [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)])


MOST_START_SECONDS, MOST_JOIN_SECONDS = 1.0, 60.0
"""Most seconds by which a large tier may delay the engine's start, and most until its first hit."""


def large(machine: Machine) -> str:
    """Start engines without tiers and with a large one, and wait for the first hit."""
    _needs_vllm(machine)
    return _alone(partial(_large, 32 if machine.is_gpu else 1, judged=machine.is_gpu), {})


def _large(gib: int, *, judged: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="kv-gpu-") as scratch:
        model = write_llama(Path(scratch) / "model")
        prompts = [prompt(seed) for seed in range(4)]
        expected = answers_without_tiers(model, prompts)  # everything is compiled and imported
        none = []
        with _timed(model, STACK):  # imports the connector
            pass
        for _ in range(2):
            with _timed(model, None) as (_, seconds):
                none.append(seconds)
        stack = {"primary": {"capacity": gib << 30}}
        with _timed(model, stack) as (running, seconds):
            began, asked = time.perf_counter(), 0
            slowest, loaded = 0.0, 0
            while not loaded:
                one = time.perf_counter()
                answers, loaded = running.loaded(lambda: running.ask(prompts))
                require(wrong(answers, expected) == [], "answers differ while the tier joins")
                slowest, asked = max(slowest, time.perf_counter() - one), asked + 1
                require(time.perf_counter() - began < 4 * MOST_JOIN_SECONDS, "the tier never served")
                if not loaded:
                    running.evict()
            joined = time.perf_counter() - began
    over = seconds - min(none)
    told = f"{gib} GiB: {over:+.2f} s over {min(none):.2f} s without; first hit {joined:.1f} s later, in ask {asked}"
    require(not judged or (over <= MOST_START_SECONDS and joined <= MOST_JOIN_SECONDS), told)
    return f"{told}; the slowest four answers meanwhile took {slowest:.2f} s"


@contextmanager
def _timed(model: Path, stack: dict[str, Any] | None) -> Iterator[tuple[Engine, float]]:
    began = time.perf_counter()
    with engine(model, stack) as running:
        yield running, time.perf_counter() - began


def _needs_vllm(machine: Machine, *, gpu_only: bool = False) -> None:
    if gpu_only and not machine.is_gpu:
        raise NotHereError("it needs a GPU")
    if importlib.util.find_spec("vllm") is None:
        raise NotHereError("it needs vLLM in this environment")


def _alone(work: Callable[[], Found], environment: dict[str, str]) -> Found:
    """Return the result of ``work`` in a new process with the environment of tests."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(environment,)) as pool:
        return pool.submit(work).result(PATIENCE_SECONDS)


def _begin(environment: dict[str, str]) -> None:
    prepare_environment()
    os.environ.update(environment)


def checks() -> tuple[Check, ...]:
    """Return a check for each way, and the others."""
    claim = "many small hits, loaded within steps beside other requests, are answered as without a cache"
    return (
        *(Check(way.name, claim, partial(steps, way)) for way in WAYS),
        Check("adapters", "adapters' KV from the tiers is as good as from the engine's own cache", adapters),
        Check("inside", "vLLM's own offloading gets its blocks back from our disk after a restart", inside),
        Check("large tier", "an engine starts as fast with a large CPU tier, which joins later", large),
    )
