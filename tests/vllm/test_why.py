"""Every prompt token that vLLM computes has one cause, and one command names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cli.runner import kv_tiering
from tests.vllm.rig import BLOCK, BLOCK_BYTES, Engine, _greedy, engine, prompt

ROWS = 24
"""Four prompts of six whole blocks."""


class Asked:
    """Requests of an engine, with the prompt tokens that vLLM computed for them."""

    def __init__(self, running: Engine, socket: Path) -> None:
        self.running = running
        self.socket = socket
        self.computed = 0

    def ask(self, tokens: list[int], salt: str | None = None, params: dict[str, Any] | None = None) -> str:
        """Answer a prompt from the tiers, not from the GPU's cache; return the id of the request."""
        self.running.settle()
        assert self.running.llm.reset_prefix_cache()
        salted = {} if salt is None else {"cache_salt": salt}
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        (output,) = self.running.llm.generate(
            [{"prompt_token_ids": tokens, **salted}], _greedy(1, **extra), use_tqdm=False
        )
        self.running.settle()
        self.computed += len(tokens) - output.num_cached_tokens
        return str(output.request_id)

    def fill(self, seed: int) -> None:
        """Let other prompts take all rows of the CPU tier."""
        for number in range(5):
            self.ask(prompt(1000 + 10 * seed + number))

    def why(self, tokens: list[int], salt: str | None = None, params: dict[str, Any] | None = None) -> list[str]:
        """Return the lines of the command about a new request with a prompt, without its id and ages."""
        name = self.ask(tokens, salt, params)
        done = kv_tiering("why", name, "--socket", self.socket)
        assert done.code == 0, done.err
        return [line.split(":")[1].strip() for line in done.out.splitlines()[1:-1]]

    def check_sum(self) -> None:
        """Compare the counters with the prompt tokens that vLLM has computed."""
        parts = self.running.connector.scheduler_half.get_stats()["misses"]
        assert sum(part["missed_tokens"] for part in parts.values()) == self.computed
        assert kv_tiering("why", "--top", "--socket", self.socket).out.startswith(f"{self.computed} prompt tokens ")


@contextmanager
def asked(model: Path, directory: Path, secondary: list[dict[str, Any]]) -> Iterator[Asked]:
    stack = {
        "primary": {"capacity": ROWS * BLOCK_BYTES},
        "secondary": secondary,
        "explain": {"socket": str(directory / "why.sock")},
    }
    with engine(model, stack) as running:
        yield Asked(running, directory / "why.sock")


def test_the_causes_of_a_cpu_tier(llama: Path, tmp_path: Path) -> None:
    first, other = prompt(1), prompt(2)
    with asked(llama, tmp_path, []) as one:
        assert one.why(first) == ["new", "remainder"]
        assert one.why(first) == ["remainder"]
        assert one.why(first[: 3 * BLOCK] + other[: 200 - 3 * BLOCK]) == ["diverged", "remainder"]
        assert one.why(first, params={"kv_tiering": {"load": False}}) == ["not_allowed", "remainder"]
        one.fill(1)
        assert one.why(first) == ["evicted cpu", "remainder"]
        one.ask(other, params={"kv_tiering": {"store": False}})
        assert one.why(other)[-2:] == ["unstored cpu", "remainder"]
        theirs = prompt(3)
        one.ask(theirs, salt="theirs")
        assert one.why(theirs, salt="mine") == one.why(prompt(4), salt="mine") == ["new", "remainder"]
        one.running.connector.reset_cache()
        one.running.settle()
        assert one.why(first) == ["new", "remainder"]
        one.check_sum()
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
