"""How much of a chain of blocks a shared medium holds, asked in few round trips.

Runs on the I/O side.  A chain is held up to some point: probe exponentially until a block is missing, then narrow the
gap; each round asks for several positions at once, because a round trip costs far more than a question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.block_store import Place, StoreProbe
from tiering.secondary.index.contract import Probe

PROBE_WIDTH = 8
"""Positions asked for in one round."""

_GROWTH = 4


def held_prefix(ask: Callable[[Sequence[Place]], StoreProbe], probe: Probe, width: int = PROBE_WIDTH) -> int | None:
    """How many leading keys of ``probe`` the medium holds; None if it could not say so of the first one.

    What it cannot say further on counts as missing.  Positions between two that are held are taken to be held: a block
    that turns out to be missing is a miss for its key when it is read.
    """
    held, missing = 0, len(probe.keys)
    bounded = False
    while held < missing:
        positions = _narrow(held, missing, width) if bounded else _reach(held, missing, width)
        answers = ask([probe.place_of(probe.keys[position]) for position in positions]).held
        for position, answer in zip(positions, answers, strict=True):
            if not answer:
                if answer is None and position == 0:
                    return None
                missing, bounded = position, True
                break
            held = position + 1
    return held


def _reach(held: int, end: int, width: int) -> list[int]:
    """Positions from ``held`` on at exponentially growing distances, the last one of the chain at most."""
    positions: list[int] = []
    step = 1
    while len(positions) < width and held + step - 1 < end - 1:
        positions.append(held + step - 1)
        step *= _GROWTH
    if len(positions) < width:
        positions.append(end - 1)
    return positions


def _narrow(held: int, missing: int, width: int) -> list[int]:
    """Positions that cut what lies between ``held`` and ``missing`` evenly; all of it when it is short."""
    gap = missing - held
    if gap <= width:
        return list(range(held, missing))
    return [held + gap * (part + 1) // (width + 1) for part in range(width)]
