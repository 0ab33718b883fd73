"""Finds the number of blocks of a chain that a shared medium holds, in few round trips.

Runs on the I/O side. A chain is held up to some point. The search probes exponentially until a block is absent, then
narrows the gap. Each round asks for several positions at once, because a round trip costs far more than a question.
A cautious probe, which most likely finds nothing, asks for the first block alone to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.index.tier_index import Probe
from tiering.medium.block_store import Place, StoreProbe

PROBE_WIDTH = 8
"""Number of positions probed in one round."""

_GROWTH = 4


def held_prefix(ask: Callable[[Sequence[Place]], StoreProbe], probe: Probe, width: int = PROBE_WIDTH) -> int | None:
    """Return how many leading keys of ``probe`` the medium holds; None if the first is not known.

    Other keys about which the medium gives no answer count as absent. Positions between two held ones are assumed to be
    held: if such a block is absent, its load is a miss.

    Args:
        ask: probes the places given to it (:meth:`~tiering.medium.block_store.BlockStore.probe`).
        probe: the probe to run.
        width: number of positions probed in one round.
    """
    held, missing = 0, len(probe.keys)
    bounded = False
    if probe.cautious and missing > 1:
        (first,) = ask([probe.place_of(probe.keys[0])]).held
        if not first:
            return None if first is None else 0
        held = probe.progress.held = 1
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
        probe.progress.held = held
    return held


def _reach(held: int, end: int, width: int) -> list[int]:
    """Return positions from ``held`` on at exponentially growing distances, ending at the chain's last."""
    positions: list[int] = []
    step = 1
    while len(positions) < width and held + step - 1 < end - 1:
        positions.append(held + step - 1)
        step *= _GROWTH
    if len(positions) < width:
        positions.append(end - 1)
    return positions


def _narrow(held: int, missing: int, width: int) -> list[int]:
    """Return positions that divide the gap between ``held`` and ``missing`` evenly; all, if it is short."""
    gap = missing - held
    if gap <= width:
        return list(range(held, missing))
    return [held + gap * (part + 1) // (width + 1) for part in range(width)]
