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

    def ask(self, tokens: list[int], *, salt: str | None = None, cold: bool = True) -> dict[str, int]:
        """Answer a prompt, after a reset of the GPU's cache if it is ``cold``; return its tokens by tier."""
        self.running.settle()
        if cold:
            assert self.running.llm.reset_prefix_cache()
        salted: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        (output,) = self.running.llm.generate([{"prompt_token_ids": tokens, **salted}], _greedy(2), use_tqdm=False)
        report = output.kv_transfer_params["kv_tiering"]
        assert report["cached_tokens"] == report["arrived_tokens"] == output.num_cached_tokens
        by_tier: dict[str, int] = report["cached_tokens_by_tier"]
        assert sum(by_tier.values()) == output.num_cached_tokens
        self.cached += output.num_cached_tokens
        return by_tier


def test_cached_tokens_by_tier_are_those_of_vllm(llama: Path) -> None:
    tier = {"type": "tests.mini_engine.chaos_tier:CHAOS_TIER", "name": "other", "seed": 1}
    stack = {"primary": {"capacity": ROWS * BLOCK_BYTES}, "secondary": [tier], "report_cached": True}
    first = prompt(1)
    with engine(llama, stack) as running:
        one = Reported(running)
        assert one.ask(first) == {}
        assert one.ask(first).keys() == {"cpu"}
        assert one.ask(first, cold=False).keys() == {"engine"}
        for number in range(5):
            one.ask(prompt(100 + number), salt="a tenant")
        assert one.ask(first).keys() == {"other"}
        one.ask(first, salt="a tenant")
        assert one.ask(first, salt="a tenant").keys() == {"cpu"}
        parts = running.connector.scheduler_half.get_stats()["cached"]
        assert sum(part["cached_tokens"] for part in parts.values()) == one.cached
        assert sum(part["cached_tokens_arrived"] for part in parts.values()) == one.cached
        assert len({name.split()[0] for name in parts}) == 2


def test_a_request_cannot_ask_for_the_report(llama: Path) -> None:
    with engine(llama, {"primary": {"capacity": ROWS * BLOCK_BYTES}}) as running:
        extra = {"extra_args": {"kv_transfer_params": {"kv_tiering": {}, "report_cached": True}}}
        (output,) = running.llm.generate([{"prompt_token_ids": prompt(1)}], _greedy(1, **extra), use_tqdm=False)
        assert not output.kv_transfer_params
