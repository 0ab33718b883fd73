"""Copies that were ordered, with the blocks that they hold references on."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.simple.metadata import NOT_HELD
from tiering.simple.requests import RequestState

Blocks = tuple[list[int], list[int]]
"""A list of GPU blocks and a co-indexed list of CPU blocks."""


@dataclass(slots=True, kw_only=True)
class Copy:
    """A copy that was ordered and has not ended."""

    gpu_blocks: list[int]
    """GPU blocks that are filled or read."""
    cpu_blocks: list[int]
    """CPU blocks, co-indexed with ``gpu_blocks``."""
    _gave_up: bool = False

    @property
    def referenced(self) -> list[int]:
        """GPU blocks that the copy holds references on."""
        return [] if self._gave_up else self.gpu_blocks

    def give_up(self) -> list[int]:
        """Return the GPU blocks whose references the caller gives back now: all of them once, then none."""
        blocks, self._gave_up = self.referenced, True
        return blocks


@dataclass(slots=True, kw_only=True)
class Load(Copy):
    """A load that was ordered and has not ended.

    ``NOT_HELD`` stands for CPU blocks that were evicted after the match.
    """

    state: RequestState
    """The request whose blocks are loaded."""
    issued: bool = False
    """True if a step's metadata has carried the load to the workers."""

    @property
    def held(self) -> list[int]:
        """CPU blocks that the load holds references on."""
        return [block for block in self.cpu_blocks if block != NOT_HELD]


@dataclass(slots=True, kw_only=True)
class Store(Copy):
    """A store event that not all workers have reported."""

    completed: int = 0
    """Number of workers that have completed the store."""
    failed: int = 0
    """Number of workers on which the store failed."""
