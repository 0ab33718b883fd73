"""A request: its tokens, how many of them have KV, and the hashes that name its blocks."""

from __future__ import annotations

import enum
import hashlib
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROOT_HASH = hashlib.sha256(b"mini-engine").digest()
"""Parent of every first block."""


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a block: sha256 over its parent's name and its tokens.

    Equal names mean equal prefixes.
    """
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


class Status(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    LOADING = "loading"
    """The request's blocks are allocated and being filled from the tiers; it computes no tokens meanwhile."""
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output. Attributes that a connector reads have vLLM's names."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int = 16
    kv_transfer_params: Mapping[str, Any] | None = None
    lora_request: None = None

    status: Status = Status.WAITING
    all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    logit_digests: list[int] = field(default_factory=list)
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    gpu_hit_tokens: int = 0
    loaded_tokens: int = 0
    preemptions: int = 0
    load_start: int = 0
    """First token that is being loaded; the tokens before it were in the GPU's cache."""
    discard_load: bool = False
    """True if the loaded KV must not be used, because the cache was reset meanwhile."""
    may_load: bool = True
    """False once a load has failed: the rest is computed."""

    def __post_init__(self) -> None:
        self.all_token_ids.extend(self.prompt)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.all_token_ids)

    @property
    def output(self) -> list[int]:
        """The tokens that were generated."""
        return self.all_token_ids[len(self.prompt) :]

    def update_hashes(self, block_size: int) -> None:
        """Name the blocks that have become full."""
        hashes = self.block_hashes
        while (len(hashes) + 1) * block_size <= self.num_tokens:
            first = len(hashes) * block_size
            hashes.append(
                hash_block(hashes[-1] if hashes else ROOT_HASH, self.all_token_ids[first : first + block_size])
            )
