"""Every prompt token that vLLM computes has one cause, and one command names it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import kv_tiering
from tests.mini_engine.chaos_tier import ChaosTier
from tests.patience import PATIENT
from tests.servers import S3Endpoint
from tests.vllm.handlers import FailEverySecond, Late
from tests.vllm.models import write_adapter
from tests.vllm.rig import BLOCK, BLOCK_BYTES, Engine, _greedy, engine, prompt
from tiering.engines.vllm import lora as engine_lora
from tiering.explain.causes import REASONS, Reason
from tiering.manager import worth
from tiering.primary.memory import region
from tiering.testing.chaos import Fault

ROWS = 24
"""Four prompts of six whole blocks."""


class Asked:
    """Requests of an engine, with the prompt tokens that vLLM computed for them."""

    def __init__(self, running: Engine, socket: Path) -> None:
        self.running = running
        self.socket = socket
        self.computed = 0

    def ask(
        self,
        tokens: list[int],
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        lora: Any = None,
        beside: list[int] | None = None,
        **sampling: Any,
    ) -> str:
        """Answer a prompt from the tiers, not from the GPU's cache; return the id of the request.

        Args:
            beside: a prompt that comes at the same time.
        """
        self.running.settle()
        assert self.running.llm.reset_prefix_cache()
        salted = {} if salt is None else {"cache_salt": salt}
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        prompts = [tokens] if beside is None else [tokens, beside]
        outputs = self.running.llm.generate(
            [{"prompt_token_ids": tokens, **salted} for tokens in prompts],
            _greedy(1, **extra, **sampling),
            use_tqdm=False,
            lora_request=lora,
        )
        self.running.settle()
        self.computed += sum(map(len, prompts)) - sum(output.num_cached_tokens for output in outputs)
        return str(outputs[0].request_id)

    def fill(self, seed: int) -> None:
        """Let other prompts take all rows of the CPU tier."""
        for number in range(5):
            self.ask(prompt(1000 + 10 * seed + number))

    def why(
        self, tokens: list[int], salt: str | None = None, params: dict[str, Any] | None = None, lora: Any = None
    ) -> list[str]:
        """Return the lines of the command about a new request with a prompt, without its id and ages."""
        return [line.split(":")[1].strip() for line in self.answer(self.ask(tokens, salt, params, lora))]

    def answer(self, name: str) -> list[str]:
        """Return the lines of the command about a request, without its id, remedies and the known time."""
        done = kv_tiering("why", name, "--socket", self.socket)
        assert done.code == 0, done.err
        return [line for line in done.out.splitlines()[1:-1] if "    to do: " not in line]

    def first_line(self, tokens: list[int], **asked: Any) -> str:
        """Return the line of the command about the first tokens of a new request."""
        return self.answer(self.ask(tokens, **asked))[0].partition(": ")[2]

    def check_sum(self) -> None:
        """Compare the counters with the prompt tokens that vLLM has computed."""
        parts = self.running.connector.scheduler_half.get_stats()["misses"]
        assert sum(part["missed_tokens"] for part in parts.values()) == self.computed
        assert kv_tiering("why", "--top", "--socket", self.socket).out.startswith(f"{self.computed} of ")


@contextmanager
def asked(
    model: Path, directory: Path, secondary: list[dict[str, Any]], blocks: int = 1_000_000, **options: Any
) -> Iterator[Asked]:
    stack = {
        "primary": {"capacity": ROWS * BLOCK_BYTES},
        "secondary": secondary,
        "explain": {"socket": str(directory / "why.sock"), "blocks": blocks},
    }
    with engine(model, stack, **options) as running:
        yield Asked(running, directory / "why.sock")


def test_the_causes_of_a_cpu_tier(llama: Path, tmp_path: Path) -> None:
    first, other = prompt(1), prompt(2)
    with asked(llama, tmp_path, []) as one:
        assert one.why(first) == ["new", "remainder"]
        assert one.why(first) == ["remainder"]
        assert one.why(first[: 3 * BLOCK] + other[: 200 - 3 * BLOCK]) == ["diverged", "remainder"]
        assert one.why(first, params={"kv_tiering": {"load": False}}) == ["not_allowed", "remainder"]
        for words in ({"load": False}, {"max_load_tokens": 2 * BLOCK}, {"load": "no such value"}):
            assert f"({REASONS[Reason.PARAMETERS]})" in one.first_line(first, params={"kv_tiering": words})
        assert f"({REASONS[Reason.LOGPROBS]})" in one.first_line(first, prompt_logprobs=1)
        unknown = kv_tiering("why", "no such request", "--socket", one.socket).err
        assert one.answer(unknown.split("; the latest: ")[1].split(",")[0])[0].endswith(f"({REASONS[Reason.LOGPROBS]})")
        one.fill(1)
        assert one.why(first) == ["evicted cpu", "remainder"]
        top = kv_tiering("why", "--top", "--socket", one.socket).out
        assert re.search(r"evicted from cpu; [0-9.]+ times the capacity or less would have kept half of them, ", top)
        one.ask(other, params={"kv_tiering": {"store": False}})
        assert one.why(other)[-2:] == ["unstored cpu", "remainder"]
        theirs = prompt(3)
        one.ask(theirs, salt="theirs")
        assert one.why(theirs, salt="mine") == one.why(prompt(4), salt="mine") == ["new", "remainder"]
        one.running.connector.reset_cache()
        one.running.settle()
        assert one.why(first) == ["new", "remainder"]
        one.check_sum()
        one.running.computed += 1
        with pytest.raises(AssertionError):
            one.running.check_causes(timeout=0.1)
        one.running.computed -= 1
    assert not one.socket.exists()


def test_the_causes_of_a_tier_behind_it(llama: Path, tmp_path: Path) -> None:
    often, once = prompt(1), prompt(2)
    local = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB", "durability": "none"}
    with asked(llama, tmp_path, [local | {"admission": "second_touch", "min_prefix_blocks": 8}]) as one:
        one.ask(often)
        one.ask(once)
        one.ask(often)
        one.fill(1)
        assert one.why(once) == ["unstored local", "remainder"]
        assert one.why(often) == ["unserved local", "remainder"]
        one.check_sum()


def test_the_first_token_that_differs_is_named(llama: Path, tmp_path: Path) -> None:
    first = prompt(1)
    with asked(llama, tmp_path, []) as one:
        one.ask(first)
        token = 3 * BLOCK + 7
        other = [*first[:token], (first[token] + 1) % 512, *first[token + 1 :]]
        assert one.first_line(other).endswith(f"; the first token that differs is {token}")
        one.check_sum()


def test_the_reasons_of_a_tier_that_serves_badly(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason of one engine, whose tier has faults and is asked only where its loads pay."""
    slow = {"type": "tests.mini_engine.chaos_tier:CHAOS_TIER", "name": "slow", "seed": 1}
    slow |= {"load_or_compute": "auto", "load_deadline": 1.0, "breaker": {"failures": 2, "probe_after": "1h"}}
    for word, value in {"FIRST": 1, "SHARE": 1e6, "MOST_OFTEN": 1.0, "MOST_COST": 1e6}.items():
        monkeypatch.setattr(worth, word, value)  # loads that pay are controls, but for the first one
    with asked(llama, tmp_path, [slow]) as one:
        half, keys, chaos = one.running.connector.scheduler_half, list[Any](), ChaosTier.built["slow"].chaos
        explainer, compute = half._misses.explainer, half.manager.note_compute
        note = explainer.missed

        def noting(missed: Any) -> None:
            keys.append(missed.keys)
            note(missed)

        monkeypatch.setattr(explainer, "missed", noting)
        prompts = [prompt(number) for number in range(11)]
        for tokens in prompts:
            one.ask(tokens)
        one.fill(1)
        monkeypatch.setattr(explainer, "missed", note)

        def computing(seconds: float) -> None:
            """Let the engine seem to need some seconds for each block; what a busy machine takes does not matter."""
            monkeypatch.setattr(half.manager, "note_compute", lambda *_, **__: compute([seconds]))
            compute([seconds])

        def lines(number: int, fault: Fault | None = None, wanted: Any = None, **asked: Any) -> list[str]:
            """Return the answer about a prompt; all its reads, or those of the ``wanted`` keys, have a fault."""
            chosen = keys[number] if wanted is None else wanted
            chaos._plan = replace(chaos._plan, delay=2.0)
            monkeypatch.setattr(chaos, "_choose", lambda _, key: (fault if key in chosen else None, 0))
            return [line.partition("tokens ")[2] for line in one.answer(one.ask(prompts[number], **asked))[:-1]]

        def unserved(reason: Reason, first: int = 0, tier: str = "slow") -> str:
            place = f"{first} to {6 * BLOCK - 1} ({6 * BLOCK - first}): unserved {tier}"
            return f"{place}: {tier} has stored the block, and it was not loaded ({REASONS[reason]})"

        computing(1.0)
        assert lines(0) == []
        assert lines(1) == [unserved(Reason.CONTROL)]
        monkeypatch.setattr(worth, "MOST_OFTEN", 0.0)
        computing(0.05)
        assert lines(2, Fault.DELAY) == [unserved(Reason.CUT)]
        assert lines(3) == [unserved(Reason.GATED)]
        computing(10.0)
        lost, gap = lines(4, Fault.BIT_FLIP, keys[4][2:3])
        assert lost.startswith(f"{2 * BLOCK} to {3 * BLOCK - 1} ({BLOCK}): lost slow: slow does not have it any more, ")
        assert gap == unserved(Reason.GAP, 3 * BLOCK, "cpu")
        assert lines(5, Fault.DELAY, beside=prompts[6]) == [unserved(Reason.LATE)]
        assert lines(7, Fault.HANG) == [unserved(Reason.HUNG)]
        chaos.release()
        assert lines(8, Fault.PERMANENT) == [unserved(Reason.FAILED)]
        lines(9, Fault.PERMANENT)  # the second failure at the latest opens the breaker
        assert lines(10) == [unserved(Reason.UNAVAILABLE)]
        one.check_sum()


def test_the_reasons_of_a_bucket_that_serves_few_or_many_blocks(
    llama: Path, tmp_path: Path, endpoint: S3Endpoint
) -> None:
    bucket = {**endpoint.words(endpoint.make_bucket("kv-cache").name, "kv/"), **PATIENT, "min_prefix_blocks": 7}
    few, many = prompt(1), prompt(2, 600)
    with asked(llama, tmp_path, [bucket]) as one:
        one.ask(few)
        one.ask(many)
        one.fill(1)
        assert one.first_line(few).endswith(f"({REASONS[Reason.SHORT]})")
        # Half of the rows may wait for loads.
        line = one.first_line(many)
        assert line.startswith("unserved s3: ")
        assert line.endswith(f"({REASONS[Reason.ROOM]})")
        assert one.running.tier("s3")["promotions"] == ROWS // 2
        one.check_sum()


def test_a_prompt_that_comes_before_the_loads_from_before_a_reset_have_ended_names_it(
    llama: Path, tmp_path: Path
) -> None:
    with asked(llama, tmp_path, []) as one:
        one.ask(prompt(1))
        running = one.running
        assert running.llm.reset_prefix_cache()
        with running.loads_through(Late) as loads:
            names = running.start([prompt(1)], 1)
            running.step()
            assert loads.held
            assert running.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            names += running.start([prompt(2)], 1)
            running.finish(names[1:])
            loads.begin()
            running.finish(names[:1])
        assert f"({REASONS[Reason.RESET]})" in one.answer(names[1])[0]
        assert one.why(prompt(3)) == ["new", "remainder"]


def test_a_prompt_that_comes_while_the_memory_is_prepared_names_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(region, "PREPARED_AT_ONCE", 0)
    monkeypatch.setattr(region, "prefault", lambda *_, **__: go.wait(60))
    with asked(llama, tmp_path, []) as one:
        lines = [one.first_line(prompt(1)) for _ in range(2)]
        assert lines == [f"not_allowed: no load was allowed ({REASONS[Reason.PREPARING]})"] * 2
        go.set()
        for thread in threading.enumerate():
            if thread.name == "kv-tiering-prepare":
                thread.join(60)
        assert one.first_line(prompt(1)).startswith("unstored cpu: ")
        assert one.why(prompt(1)) == ["remainder"]
        one.check_sum()


def test_blocks_whose_records_were_dropped_are_not_examined(llama: Path, tmp_path: Path) -> None:
    """A table of 1,024 records drops about half of the first blocks, by random hashes."""
    first = [prompt(seed) for seed in range(10)]
    with asked(llama, tmp_path, [], blocks=1024) as one:
        one.running.ask(first, 1)
        one.running.ask([prompt(seed) for seed in range(100, 270)], 1)
        found = {line.split(":")[1].strip() for tokens in first for line in one.answer(one.ask(tokens))}
        assert "unexamined" in found


def test_a_tier_that_is_never_loaded_is_gated(llama: Path, tmp_path: Path) -> None:
    local = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB", "durability": "none"}
    with asked(llama, tmp_path, [local | {"load_or_compute": "never"}]) as one:
        one.ask(prompt(1))
        one.fill(1)
        assert f"({REASONS[Reason.GATED]})" in one.first_line(prompt(1))
        one.check_sum()


def test_a_load_to_the_gpu_that_fails_is_named(llama: Path, tmp_path: Path) -> None:
    with asked(llama, tmp_path, []) as one:
        one.ask(prompt(1))
        with one.running.loads_through(FailEverySecond):
            assert one.first_line(prompt(1)).startswith("load_failed: ")


def test_the_tokens_of_another_adapter_are_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.request import LoRARequest

    path = write_adapter(tmp_path / "adapter", 1)
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}
    with asked(llama, tmp_path, [], **options) as one:
        adapter = LoRARequest("one", 1, str(path))
        monkeypatch.setattr(engine_lora, "READ_PATIENCE", -1.0)  # the worker's report comes too late
        assert f"({REASONS[Reason.ADAPTER]})" in one.first_line(prompt(9), lora=adapter)
        one.ask(prompt(1), salt="mine")
        assert one.why(prompt(1), salt="mine", lora=adapter) == ["other_adapter", "remainder"]
        one.ask(prompt(2), salt="theirs")
        assert one.why(prompt(2), salt="mine", lora=adapter) == ["new", "remainder"]
        one.check_sum()


def test_the_sum_holds_when_requests_of_several_adapters_are_preempted(llama: Path, tmp_path: Path) -> None:
    """A request that starts again finds blocks that it, or another one, has left in either cache."""
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
    paths = [write_adapter(tmp_path / f"adapter {number}", number) for number in (1, 2)]
    with asked(llama, tmp_path, [], num_gpu_blocks_override=40, **options) as one:
        running = one.running
        adapters = [LoRARequest(str(number), number, str(path)) for number, path in enumerate(paths, 1)]
        for adapter in adapters:
            running.ask([prompt(9)[:8]], 1, lora=adapter)  # the worker reports the adapter's content
        for turn in range(3):
            names = []
            for adapter in (None, *adapters):
                names += running.start([prompt(turn + number) for number in range(3)], 64, lora_request=adapter)
            running.finish(names)
            running.settle()
            assert running.llm.reset_prefix_cache()
        assert running.preempted > 0
        running.check_causes()
        assert running.connector.scheduler_half.get_stats()["misses"]["other_adapter "]["missed_tokens"] > 0
