"""Common parts of the benchmarks with the real vLLM: a model, an engine, one request step by step."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.rig import Engine, engine
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.secondary.contract import TransferJob

LAYERS, HIDDEN, HEADS, VOCABULARY = 12, 768, 12, 4096
BLOCK = 32
TOKEN_BYTES = LAYERS * 2 * HIDDEN * 4
BLOCK_BYTES = BLOCK * TOKEN_BYTES
MAX_LEN = 4608
GPU_BLOCKS = 280
STEP_PAUSE = 0.001
"""Seconds that vLLM's engine core rests after a step without a run of the model, while work is open."""


def progress(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def write_model(directory: Path, **words: Any) -> Path:
    """Write a Llama with random weights whose logits depend on the whole context.

    Args:
        directory: where the model goes.
        words: words of the model's configuration; default: 12 layers, hidden size 768, float32.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    config = LlamaConfig(**usual | words)
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


def prompt(seed: int, length: int) -> list[int]:
    """Return random tokens."""
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY) for _ in range(length)]


@contextmanager
def running(model: Path, stack: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """Run an engine with ``stack`` behind it; None means without connector."""
    settings = {
        "num_gpu_blocks_override": GPU_BLOCKS,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 4,
    }
    with engine(model, stack, **settings | options) as started:
        yield started


@dataclass(slots=True)
class Asked:
    """One request from its arrival on.

    ``ttft`` is the number of seconds to the first token; ``steps`` has (begin, end) of each engine step until then.
    ``decode`` has the seconds of each later step. ``keys`` are those of the prompt's blocks if there is a connector.
    """

    tokens: list[int]
    ttft: float
    steps: list[tuple[float, float]]
    decode: list[float]
    keys: list[Any]


_ids = itertools.count()


def ask(
    running: Engine,
    tokens: list[int],
    max_tokens: int,
    tiers: Sequence[str] | None = None,
    load: bool = True,
    beside: list[int] | None = None,
) -> Asked:
    """Ask for ``max_tokens`` tokens.

    Args:
        tiers: secondary tiers that may be used; default: all.
        load: False if nothing may be loaded.
        beside: prompt that arrives just before and uses no tiers; it is answered as well. Default: none.
    """
    from vllm import SamplingParams

    words: dict[str, Any] = {} if load else {"load": False}
    if tiers is not None:
        words["tiers"] = list(tiers)
    extra = {"extra_args": {"kv_transfer_params": {"kv_tiering": words}}} if words else {}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, **extra)
    core, scheduler = running.llm.llm_engine, running.scheduler
    steps: list[tuple[float, float]] = []
    first, before = 0.0, 0
    keys: list[Any] = []
    got: list[int] = []
    arrived, name = time.perf_counter(), f"ask-{next(_ids)}"
    if beside is not None:
        alone = {"kv_transfer_params": {"kv_tiering": {"load": False, "store": False}}}
        other = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=alone)
        core.add_request(f"ask-{next(_ids)}", {"prompt_token_ids": beside}, other)
    core.add_request(name, {"prompt_token_ids": tokens}, sampling)
    while len(got) < max_tokens:
        begun, scheduled = time.perf_counter(), len(running.scheduled)
        outputs = [output for output in core.step() if output.request_id == name]
        ended = time.perf_counter()
        steps.append((begun, ended))
        if outputs:
            got = list(outputs[0].outputs[0].token_ids)
            if not first:
                first = ended
                before = len(steps)
        elif scheduler.has_requests() and (len(running.scheduled) == scheduled or not running.scheduled[-1]):
            time.sleep(STEP_PAUSE)
        if running.connector is not None and not keys:
            states = running.connector.scheduler_half.states
            keys = [key for state in states.values() for key in state.groups[0].keys]
    while beside is not None and core.has_unfinished_requests():
        core.step()
    return Asked(got, first - arrived, steps[:before], [end - begin for begin, end in steps[before:]], keys)


def generate(running: Engine, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Answer all prompts, which arrive together."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    core = running.llm.llm_engine
    for tokens in prompts:
        core.add_request(f"ask-{next(_ids)}", {"prompt_token_ids": tokens}, sampling)
    while core.has_unfinished_requests():
        core.step()


def settle(running: Engine, timeout: float = 120.0) -> None:
    """Step, as the engine core does, until no copy and no tier's job is in flight."""
    end = time.monotonic() + timeout
    while running.connector is not None and running.connector.has_pending_push_work():
        if time.monotonic() > end:
            raise RuntimeError("copies or tiers did not end")
        running.llm.llm_engine.step()
        time.sleep(STEP_PAUSE)


@dataclass
class Watch:
    """Times of I/O, as (begin, end) in seconds of ``time.perf_counter``.

    They are those of each tier's loads, and of copies to the GPU under the name "cpu".
    """

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def attach(self, running: Engine) -> None:
        """Watch ``running``'s loads from now on."""
        for tier in running.connector.scheduler_half.manager.secondary_tiers:
            self._watch_tier(tier.name, tier.io)
        copies = running.worker.worker_half.copies
        self._watch_copies(copies.handlers[CPULoadStoreSpec, GPULoadStoreSpec])

    def clear(self) -> None:
        self.spans.clear()
        self.moved.clear()

    def during(self, step: tuple[float, float]) -> bool:
        """Return True if any I/O ran in some part of ``step``."""
        begin, end = step
        return any(start < end and stop > begin for spans in self.spans.values() for start, stop in spans)

    def seconds(self, name: str) -> float:
        """Return the seconds from the first beginning to the last end."""
        spans = self.spans.get(name)
        return max(stop for _, stop in spans) - min(start for start, _ in spans) if spans else 0.0

    def _note(self, name: str, begin: float, end: float, moved: int) -> None:
        self.spans.setdefault(name, []).append((begin, end))
        self.moved[name] = self.moved.get(name, 0) + moved

    def _watch_tier(self, name: str, io: Any) -> None:
        begun: dict[int, float] = {}
        submit, finish = io.submit, io._end

        def submitting(job: Any) -> None:
            begun[id(job)] = time.perf_counter()
            submit(job)

        def ending(item: Any) -> None:
            if isinstance(item, TransferJob) and item.is_promotion:
                self._note(name, begun.pop(id(item)), time.perf_counter(), item.moved_bytes)
            finish(item)

        io.submit, io._end = submitting, ending

    def _watch_copies(self, handler: Any) -> None:
        begun: dict[int, float] = {}
        start, finished = handler.transfer_all_async, handler.get_finished

        def starting(jobs: Sequence[tuple[int, Any]]) -> list[int]:
            begun.update((job_id, time.perf_counter()) for job_id, _ in jobs)
            refused: list[int] = start(jobs)
            return refused

        def ending() -> list[Any]:
            results: list[Any] = finished()
            for result in results:
                begin = begun.pop(result.job_id)
                self._note("cpu", begin, begin + (result.transfer_time or 0.0), result.transfer_size or 0)
            return results

        handler.transfer_all_async, handler.get_finished = starting, ending


def until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Poll ``condition`` without keeping a core busy."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not happen within {timeout:g} s")
        time.sleep(0.0005)
