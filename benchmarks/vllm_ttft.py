"""Time to the first token of a prompt of 4,000 tokens, computed or loaded, in the real vLLM.

The model is a Llama of 12 layers, hidden size 768, float32 (73,728 bytes of KV per token), on vLLM's CPU platform in
one process. Every round computes a new prompt, then gets it back, in turns, from the engine's own prefix cache, the CPU
tier, the local tier and an S3 server (rclone on loopback). The CPU tier has room for 1.3 prompts. Two other prompts
push the first one out before each turn of a slower tier. The bytes read from the tier and copied to the engine's blocks
are checked, and so are the tokens.

Bandwidths are those of the same bytes, moved by the same tier in the same round while the engine stands still (from the
tier into the CPU tier's rows; from the CPU tier into the engine's blocks). A step is one of the engine's median decode
steps at this context. The limit is the engine's own cache plus 1.5 times the transfer plus two steps. "Steps beside
I/O" are engine steps between arrival and first token in which no transfer ran, beyond the steps that a hit in the
engine's own cache takes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Cell
from benchmarks.vllm_engine import (
    BLOCK,
    BLOCK_BYTES,
    Asked,
    Watch,
    ask,
    progress,
    prompt,
    running,
    settle,
    until,
    write_model,
)
from tests.servers import rclone_server
from tests.vllm.rig import Engine
from tiering.api.request import ReqContext
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec

LENGTH = 4000
BLOCKS = LENGTH // BLOCK
TOKENS = 6
ROUNDS = 5
TIERS = ("cpu", "local", "s3")
SECONDARY = TIERS[1:]
TRANSFER_FACTOR, STEPS = 1.5, 2


@dataclass(slots=True)
class Rounds:
    """The measurements, one entry per round: seconds, bytes per second, steps."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    bandwidth: dict[str, list[float]] = field(default_factory=dict)
    in_flight: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    beside: dict[str, list[int]] = field(default_factory=dict)
    decode: list[float] = field(default_factory=list)


def run(bench: Bench) -> None:
    """Run rounds on one engine, then write the table."""
    progress("ttft: writing the model")
    model = write_model(bench.directory / "model")
    with stack_of(bench.directory) as stack, running(model, stack) as engine:
        rounds = Subject(engine).measure(1 if bench.quick else ROUNDS)
    report(bench, rounds)


@contextmanager
def stack_of(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a stack of a CPU tier of 1.3 prompts, a local tier, and a bucket on a server of its own.

    The server's credentials are in the environment for as long as the context lasts.
    """
    with ExitStack() as opened:
        server = opened.enter_context(rclone_server())
        before = dict(os.environ)
        os.environ.update(server.environment())
        opened.callback(os.environ.update, before)
        opened.callback(os.environ.clear)
        bucket = server.make_bucket("kv-cache")
        yield {
            "primary": {"capacity": BLOCKS * 13 // 10 * (BLOCK_BYTES + 4096), "promotion_share": 1.0},
            "secondary": [
                {"type": "local", "path": str(directory / "disk"), "capacity": "4GiB", "primary_share": 1.0},
                {
                    "type": "s3",
                    "bucket": bucket.name,
                    "endpoint_url": server.endpoint,
                    "prefix": "kv/",
                    "primary_share": 1.0,
                },
            ],
        }


class Subject:
    """One engine, and the prompts that push others out of its CPU tier."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = Watch()
        self._watch.attach(engine)
        self._rounds = Rounds()
        self._jobs = itertools.count(1 << 40)
        self._fillers = [prompt(1_000 + number, LENGTH) for number in range(2)]

    def measure(self, count: int) -> Rounds:
        for filler in self._fillers:
            progress("ttft: computing a prompt that pushes others out")
            ask(self._engine, filler, 1, tiers=["local"])
            self._reset()
        for number in range(count):
            self._round(number)
        return self._rounds

    def _round(self, number: int) -> None:
        tokens = prompt(number, LENGTH)
        computed = ask(self._engine, tokens, TOKENS)
        self._note("recompute", computed)
        self._reset()
        paths = ["own cache", *TIERS]
        for path in paths[number % 4 :] + paths[: number % 4]:
            answer = self._back(path, tokens)
            if answer.tokens != computed.tokens:
                raise RuntimeError(f"{path}: other tokens than computed: {answer.tokens}, {computed.tokens}")
            self._note(path, answer)
            if path == "own cache":
                self._rounds.decode.append(statistics.median(answer.decode))
            self._reset()
        for tier in SECONDARY:
            self._push_out()
            self._rounds.bandwidth.setdefault(tier, []).append(self._promote(tier, computed.keys[:BLOCKS]))
        self._rounds.bandwidth.setdefault("cpu", []).append(self._copy(computed.keys[:BLOCKS]))
        last = {path: f"{values[-1] * 1e3:.0f} ms" for path, values in self._rounds.ttft.items()}
        rates = {tier: f"{values[-1] / 1e9:.2f} GB/s" for tier, values in self._rounds.bandwidth.items()}
        beside = {
            tier: f"{values[-1]} of {self._rounds.steps[tier][-1]}" for tier, values in self._rounds.beside.items()
        }
        io = {tier: f"{values[-1] * 1e3:.0f} ms" for tier, values in self._rounds.in_flight.items()}
        step = f"{self._rounds.decode[-1] * 1e3:.0f} ms"
        progress(
            f"ttft: round {number + 1}: {last}; alone {rates}; I/O {io}; steps without I/O {beside}; "
            f"a decoding step {step}"
        )

    def _back(self, path: str, tokens: list[int]) -> Asked:
        """Ask for the prompt from ``path`` alone; the bytes of each tier are checked."""
        if path in {"own cache", "cpu"}:
            ask(self._engine, tokens, 1)
            if path == "cpu":
                self._reset()
            else:
                settle(self._engine)
        else:
            self._push_out()
        self._watch.clear()
        read = {tier: self._read_bytes(tier) for tier in SECONDARY}
        tiers = [path] if path in SECONDARY else []
        # The engine computes the last block of a prompt that its own cache holds; the connector would have brought it
        # from the CPU tier.
        load = path != "own cache"
        answer: Asked
        answer, loaded = self._engine.loaded(lambda: ask(self._engine, tokens, TOKENS, tiers=tiers, load=load))
        expected = {"gpu": BLOCKS if load else 0} | {tier: BLOCKS if tier == path else 0 for tier in SECONDARY}
        # A tier reads a header with each block.
        seen = {"gpu": loaded / BLOCK_BYTES} | {
            tier: (self._read_bytes(tier) - read[tier]) // BLOCK_BYTES for tier in SECONDARY
        }
        if seen != expected:
            raise RuntimeError(f"{path}: {seen} blocks were loaded, not {expected}")
        return answer

    def _note(self, path: str, answer: Asked) -> None:
        rounds = self._rounds
        rounds.ttft.setdefault(path, []).append(answer.ttft)
        rounds.steps.setdefault(path, []).append(len(answer.steps))
        if path in TIERS:
            rounds.beside.setdefault(path, []).append(sum(not self._watch.during(step) for step in answer.steps))
            rounds.in_flight.setdefault(path, []).append(sum(self._watch.seconds(name) for name in {path, "cpu"}))

    def _reset(self) -> None:
        settle(self._engine)
        if not self._engine.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    def _push_out(self) -> None:
        for filler in self._fillers:
            ask(self._engine, filler, 1, tiers=["local"])
            self._reset()

    def _read_bytes(self, tier: str) -> int:
        return int(self._engine.tier(tier)["read_bytes"])

    # ---------------------------------------------------------------------------- bandwidths, the engine standing still

    def _promote(self, tier: str, keys: list[Any]) -> float:
        """Return the bytes per second from ``tier`` into the CPU tier's rows."""
        manager = self._engine.connector.scheduler_half.manager
        context = ReqContext(f"bandwidth-{next(self._jobs)}", {"kv_tiering": {"tiers": [tier]}})
        manager.on_new_request(context)
        before, begun = self._read_bytes(tier), time.perf_counter()

        def arrived() -> bool:
            found = manager.match_prefix(keys, context)
            manager.on_schedule_end()
            return bool(found.hits == len(keys) and not found.pending)

        until(arrived, f"the load from {tier}")
        seconds = time.perf_counter() - begun
        manager.on_request_finished(context)
        blocks = (self._read_bytes(tier) - before) // BLOCK_BYTES
        if blocks != len(keys):
            raise RuntimeError(f"{tier}: {blocks} blocks were read, not {len(keys)}")
        return blocks * BLOCK_BYTES / seconds

    def _copy(self, keys: list[Any]) -> float:
        """Return the bytes per second from the CPU tier's rows into the engine's blocks, which are empty."""
        manager = self._engine.connector.scheduler_half.manager
        context = ReqContext(f"bandwidth-{next(self._jobs)}")
        manager.on_new_request(context)
        source = manager.prepare_load(keys, context)
        handler = self._engine.worker.worker_half.copies.handlers[CPULoadStoreSpec, GPULoadStoreSpec]
        job = next(self._jobs)
        handler.transfer_async(job, (source, GPULoadStoreSpec(list(range(1, len(keys) + 1)), [len(keys)], [0])))
        handler.wait({job})
        (result,) = handler.get_finished()
        manager.complete_load(keys, context)
        manager.on_request_finished(context)
        if not result.success:
            raise RuntimeError("the copy failed")
        return float(result.transfer_size / result.transfer_time)


def report(bench: Bench, rounds: Rounds) -> None:
    """Write the table and the targets."""
    ttft = {path: statistics.median(values) for path, values in rounds.ttft.items()}
    rate = {tier: statistics.median(values) for tier, values in rounds.bandwidth.items()}
    step, own, nbytes = statistics.median(rounds.decode), ttft["own cache"], BLOCKS * BLOCK_BYTES
    usual = statistics.median(rounds.steps["own cache"])
    rows: list[tuple[Cell, ...]] = [
        ("recompute", ttft["recompute"] * 1e3, "", "", "", "", ""),
        ("the engine's own cache", own * 1e3, "", "", "", usual, ""),
    ]
    for tier in TIERS:
        transfer = nbytes / rate["cpu"] + (nbytes / rate[tier] if tier != "cpu" else 0.0)
        limit = own + TRANSFER_FACTOR * transfer + STEPS * step
        beside = max(0.0, statistics.median(rounds.beside[tier]) - usual)
        io = statistics.median(rounds.in_flight[tier])
        rows.append(
            (
                tier,
                ttft[tier] * 1e3,
                nbytes / 1e6,
                rate[tier] / 1e9,
                io * 1e3,
                statistics.median(rounds.steps[tier]),
                beside,
            )
        )
        bench.target(f"TTFT, back from {tier}", ttft[tier] * 1e3, limit * 1e3, "max", "ms")
        bench.target(f"steps beside I/O, back from {tier}", beside, STEPS, "max", "steps")
    bench.table(
        f"{LENGTH} tokens, medians of {len(rounds.decode)} rounds",
        ("KV from", "TTFT ms", "MB", "tier alone GB/s", "I/O in flight ms", "steps to first token", "beside I/O"),
        rows,
    )
    bench.note(f"A step that decodes one token at this context takes {step * 1e3:.1f} ms (median).")
