"""The cached tokens that responses and counters report are those that vLLM itself counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.rig import BLOCK_BYTES, Engine, _greedy, engine, prompt

ROWS = 24
"""Four prompts of six whole blocks."""


class Reported:
    """An engine that reports, and the sum of the reports of its requests."""

    def __init__(self, running: Engine) -> None:
        self.running = running
        self.cached = 0

    def ask(
        self, *prompts: list[int], salt: str | None = None, cold: bool = True, max_tokens: int = 2
    ) -> list[dict[str, Any]]:
        """Answer prompts, after a reset of the GPU's cache if they are to be ``cold``; return their reports."""
        self.running.settle()
        if cold:
            assert self.running.llm.reset_prefix_cache()
        salted: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        inputs = [{"prompt_token_ids": tokens, **salted} for tokens in prompts]
        outputs = self.running.llm.generate(inputs, _greedy(max_tokens), use_tqdm=False)
        self.cached += sum(output.num_cached_tokens for output in outputs)
        reports = [output.kv_transfer_params["kv_tiering"] for output in outputs]
        for report, output in zip(reports, outputs, strict=True):
            assert report["cached_tokens"] == output.num_cached_tokens
            assert sum(report["cached_tokens_by_tier"].values()) == output.num_cached_tokens
        return reports

    def tiers(self, tokens: list[int], **asked: Any) -> dict[str, int]:
        """Return the tokens by tier of a prompt that all arrive."""
        (report,) = self.ask(tokens, **asked)
        assert report["arrived_tokens"] == report["cached_tokens"]
        by_tier: dict[str, int] = report["cached_tokens_by_tier"]
        return by_tier

    def counted(self) -> tuple[int, int]:
        """Return the planned and the arrived tokens of all tenants and tiers."""
        parts = self.running.connector.scheduler_half.get_stats()["cached"].values()
        return sum(part["cached_tokens"] for part in parts), sum(part["cached_tokens_arrived"] for part in parts)


def test_cached_tokens_by_tier_are_those_of_vllm(llama: Path) -> None:
    tier = {"type": "tests.mini_engine.chaos_tier:CHAOS_TIER", "name": "other", "seed": 1}
    stack = {"primary": {"capacity": ROWS * BLOCK_BYTES}, "secondary": [tier], "report_cached": True}
    first = prompt(1)
    with engine(llama, stack) as running:
        one = Reported(running)
        assert one.tiers(first) == {}
        assert one.tiers(first).keys() == {"cpu"}
        assert one.tiers(first, cold=False).keys() == {"engine"}
        for number in range(5):
            one.ask(prompt(100 + number), salt="a tenant")
        assert one.tiers(first).keys() == {"other"}
        one.ask(first, salt="a tenant")
        assert one.tiers(first, salt="a tenant").keys() == {"cpu"}
        assert one.counted() == (one.cached, one.cached)
        assert len({name.split()[0] for name in running.connector.scheduler_half.get_stats()["cached"]}) == 2
        # What a preempted request finds or loads again counts no more.
        one.ask(*(prompt(200 + number) for number in range(6)), max_tokens=100)
        again = one.ask(*(prompt(200 + number) for number in range(6)), max_tokens=100)
        assert running.preempted > 0
        assert any(report["cached_tokens"] for report in again)
        assert one.counted() == (one.cached, one.cached)


def test_a_request_cannot_ask_for_the_report(llama: Path) -> None:
    with engine(llama, {"primary": {"capacity": ROWS * BLOCK_BYTES}}) as running:
        extra = {"extra_args": {"kv_transfer_params": {"kv_tiering": {}, "report_cached": True}}}
        (output,) = running.llm.generate([{"prompt_token_ids": prompt(1)}], _greedy(1, **extra), use_tqdm=False)
        assert not output.kv_transfer_params
