"""Copies that were ordered, with the blocks that they hold references on."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.simple.metadata import NOT_HELD
from tiering.simple.requests import RequestState

Blocks = tuple[list[int], list[int]]
"""A list of GPU blocks and a co-indexed list of CPU blocks."""


@dataclass(slots=True)
class Load:
    """A load that was ordered and has not ended."""

    state: RequestState
    """The request whose blocks are loaded."""
    gpu_blocks: list[int]
    """GPU blocks to fill."""
    cpu_blocks: list[int]
    """CPU blocks, co-indexed with ``gpu_blocks``; ``NOT_HELD`` for blocks evicted after the match."""
    issued: bool = False
    """True if a step's metadata has carried the load to the workers."""

    @property
    def held(self) -> list[int]:
        """CPU blocks that the load holds references on."""
        return [block for block in self.cpu_blocks if block != NOT_HELD]


@dataclass(slots=True)
class Store:
    """A store event that not all workers have reported."""

    gpu_blocks: list[int]
    """GPU blocks that are read."""
    cpu_blocks: list[int]
    """CPU blocks that are written, co-indexed with ``gpu_blocks``."""
    completed: int = 0
    """Number of workers that have completed the store."""
    failed: int = 0
    """Number of workers on which the store failed."""
