"""Copies that were ordered, and what they have references on."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.simple.metadata import NOT_HELD
from tiering.simple.request_state import RequestState

Blocks = tuple[list[int], list[int]]
"""GPU blocks and, co-indexed, CPU blocks."""


@dataclass(slots=True)
class Load:
    """A load that was ordered.  ``cpu_blocks`` is co-indexed with ``gpu_blocks``."""

    state: RequestState
    gpu_blocks: list[int]
    cpu_blocks: list[int]
    issued: bool = False

    @property
    def held(self) -> list[int]:
        """The CPU blocks it has references on."""
        return [block for block in self.cpu_blocks if block != NOT_HELD]


@dataclass(slots=True)
class Store:
    """A store event that not all workers have reported."""

    gpu_blocks: list[int]
    cpu_blocks: list[int]
    completed: int = 0
    failed: int = 0
