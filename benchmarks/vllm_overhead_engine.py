"""One engine of the benchmark ``vllm_overhead``, in a process of its own.

At its top the module imports the standard library alone: the engine's process may take the code of the project from
another checkout, and chooses it before the first import.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VOCABULARY = 512
STEP_PAUSE = 0.001
"""Seconds that vLLM's engine core rests after a step without a run of the model, while work is open."""
LONGEST_TAIL = 20.0
"""Most seconds from the last answer until nothing is in flight any more."""
REST = 0.002
"""Seconds without CPU time after which a process that the engine has started is at rest."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 300,
    "gpu_memory_utilization": 0.2,
    "max_model_len": 4400,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine to start.

    Attributes:
        model: directory of the model.
        transfer: value of --kv-transfer-config; None: no connector.
        environment: further environment of the process.
        copies: library that lets vLLM's own connectors run; None: not needed.
        tree: another checkout of the project to take the code from; None: this one.
        options: options of vLLM that differ from :data:`SETTINGS`.
        service: process beside the engine whose CPU counts as that of one which it has started; None: there is none.
    """

    model: Path
    transfer: dict[str, Any] | None
    environment: dict[str, str]
    copies: Path | None = None
    tree: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    service: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to answer.

    Attributes:
        seeds: number that yields a prompt's random tokens, by request.
        length: tokens of each prompt.
        outputs: tokens of each answer.
        at_once: requests that run at the same time.
        words: the requests' words for the tiers; none: the usual ones.
        pauses: False if the engine does not rest after a step without a run of the model, as one inside the caller's
            process.
    """

    seeds: tuple[int, ...]
    length: int
    outputs: int
    at_once: int = 1
    words: dict[str, Any] = field(default_factory=dict)
    pauses: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests, prompts and answers."""
        return len(self.seeds) * (self.length + self.outputs)


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers of an engine to a :class:`Load`, and their cost.

    Attributes:
        cpu: CPU seconds of all threads, from the first request until nothing is in flight, and ``children``.
        thread: CPU seconds of the engine's thread until the last answer.
        calls: its CPU seconds in calls of the connector, until then.
        draining: its CPU seconds from then on.
        copies: CPU seconds of the copies between GPU blocks and the CPU tier.
        children: CPU seconds of the processes that the engine has started (``io: process``) and of its service, until
            they rest.
        tail: seconds from the last answer until nothing is in flight.
        steps: steps of the engine until the last answer.
        runs: steps among them that ran the model.
        ttft: seconds to the first token, by request.
        cached: number of tokens that were not computed, by request.
        answers: the tokens, by request.
    """

    cpu: float
    thread: float
    calls: float
    draining: float
    copies: float
    children: float
    tail: float
    steps: int
    runs: int
    ttft: list[float]
    cached: list[int]
    answers: list[list[int]]


def serve(pipe: Connection, setting: Setting) -> None:
    """Run an engine's process until the pipe is closed.

    A :class:`Load` is answered with an :class:`Answered`. "gpu" empties the engine's own cache, and "cpu" the CPU tier
    too; both are answered with True if that was possible.
    """
    os.environ.update(ENVIRONMENT | setting.environment)
    if setting.tree is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] in {"tiering", "tiers"}]:
            del sys.modules[name]  # imported by the start of the process, from the other checkout
        sys.path.insert(0, str(setting.tree))
    from vllm import LLM

    copies = None
    if setting.copies is not None:
        from benchmarks.vllm_own import install

        copies = install(setting.copies)
    llm = LLM(str(setting.model), kv_transfer_config=setting.transfer, **SETTINGS | setting.options)
    engine = _Engine(llm, copies, setting.service)
    pipe.send("ready")
    try:
        while True:
            order = pipe.recv()
            if isinstance(order, Load):
                pipe.send(engine.answer(order))
            else:
                pipe.send(bool(engine.llm.reset_prefix_cache(reset_connector=order == "cpu")))
    except EOFError:
        engine.core.shutdown()


class _CallTimes:
    """The CPU time of calls of connectors. Most of it would vanish in the noise of whole steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """CPU seconds so far, of the calling thread."""
        self._inside = False

    def watch(self, connector: Any) -> None:
        """Measure the calls of all public methods of a connector from now on."""
        for name in dir(type(connector)):
            if not name.startswith("_") and inspect.isfunction(getattr(type(connector), name)):
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            self._inside, began = True, time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began
                self._inside = False

        return timed


class _Children:
    """The processes that this one has started, and the service beside it, if there is one."""

    def __init__(self, service: int | None) -> None:
        lists = Path("/proc/self/task").glob("*/children")
        numbers = [int(number) for path in lists for number in path.read_text().split()]
        self._clocks = [~number << 3 | 2 for number in (*numbers, *([] if service is None else [service]))]
        """Numbers of their CPU clocks, as of clock_getcpuclockid(3), which Python lacks."""

    def seconds(self) -> float:
        """Return their CPU seconds so far."""
        return sum(map(time.clock_gettime, self._clocks))

    def seconds_at_rest(self, deadline: float) -> float:
        """Return their CPU seconds when they have used none for :data:`REST`."""
        seconds = self.seconds()
        while self._clocks:
            time.sleep(REST)
            before, seconds = seconds, self.seconds()
            if seconds == before:
                break
            if time.perf_counter() > deadline:
                raise RuntimeError("a process that the engine has started does not rest")
        return seconds


class _Engine:
    """A vLLM engine that is stepped by hand, as its core's loop does it."""

    def __init__(self, llm: Any, copies: Any, service: int | None) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group as worker

        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self._copies = copies
        self._service = service
        self._copied_here = 0.0
        """CPU seconds of the project's copies in the engine's own thread."""
        half = getattr(worker(), "worker_half", None) if self.core.scheduler.connector else None
        for handler in half.copies.handlers.values() if half is not None else ():
            if hasattr(handler, "_copy_here"):
                handler._copy_here = self._counted(handler._copy_here)
        self._calls = _CallTimes()
        for connector in [self.core.scheduler.connector, worker()] if self.core.scheduler.connector else []:
            self._calls.watch(connector)
        self._names = 0
        self._ran = True
        self._runs = 0
        self._pauses = True
        step = self.core.step_fn

        def noted() -> Any:
            outputs, self._ran = step()
            self._runs += self._ran
            return outputs, self._ran

        self.core.step_fn = noted

    def answer(self, load: Load) -> Answered:
        """Answer all requests, and step until nothing is in flight."""
        from vllm import SamplingParams

        extra = {"extra_args": {"kv_transfer_params": {"kv_tiering": load.words}}} if load.words else {}
        sampling = SamplingParams(temperature=0, max_tokens=load.outputs, detokenize=False, ignore_eos=True, **extra)
        waiting = [_tokens(seed, load.length) for seed in load.seeds]
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        ended: dict[str, Any] = {}
        steps, self._runs, self._pauses = 0, 0, load.pauses
        children = _Children(self._service)
        worked = children.seconds()
        copies, calls, cpu, thread = self._copy_seconds(), self._calls.seconds, time.process_time(), time.thread_time()
        while len(ended) < len(waiting):
            while len(arrived) < len(waiting) and len(arrived) - len(ended) < load.at_once:
                self._names += 1
                name = f"request-{self._names}"
                tokens = {"prompt_token_ids": waiting[len(arrived)]}
                arrived[name] = time.perf_counter()
                self.llm.llm_engine.add_request(name, tokens, sampling)
            for output in self._step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter())
                if output.finished:
                    ended[output.request_id] = output
            steps += 1
        runs, calls = self._runs, self._calls.seconds - calls
        thread, draining, began = time.thread_time() - thread, time.thread_time(), time.perf_counter()
        while self.core.scheduler.has_requests():
            self._step()
            if time.perf_counter() - began > LONGEST_TAIL:
                raise RuntimeError(f"copies or tiers did not end within {LONGEST_TAIL:g} s")
        cpu, draining = time.process_time() - cpu, time.thread_time() - draining
        worked = children.seconds_at_rest(began + LONGEST_TAIL) - worked
        return Answered(
            cpu=cpu + worked,
            thread=thread,
            calls=calls,
            draining=draining,
            copies=self._copy_seconds() - copies,
            children=worked,
            tail=time.perf_counter() - began,
            steps=steps,
            runs=runs,
            ttft=[first[name] - at for name, at in arrived.items()],
            cached=[ended[name].num_cached_tokens or 0 for name in arrived],
            answers=[list(ended[name].outputs[0].token_ids) for name in arrived],
        )

    def _step(self) -> list[Any]:
        outputs: list[Any] = self.llm.llm_engine.step()
        if self._pauses and not self._ran and self.core.scheduler.has_requests():
            time.sleep(STEP_PAUSE)
        return outputs

    def _counted(self, copy: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(order: Any) -> None:
            began = time.thread_time()
            copy(order)
            self._copied_here += time.thread_time() - began

        return counted

    def _copy_seconds(self) -> float:
        """Return the CPU seconds of the copies so far: of the native call, or of the project's copies."""
        if self._copies is not None:
            return float(self._copies.seconds)
        seconds = 0
        for thread in threading.enumerate():
            if thread.name.startswith(("kv-tiering-store", "kv-tiering-load")):
                seconds += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
        return seconds / 1e9 + self._copied_here


def _tokens(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY) for _ in range(length)]
