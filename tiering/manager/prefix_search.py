"""The search for the longest prefix that is held: through the primary table, what is in flight to it, and the secondary tiers.

What a tier holds beyond the primary tier is promoted on the way.  Nothing is asked or pinned twice in one search, so
that a prefix with many holes costs what one without costs, and a little for each hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.transfer import Rows
from tiering.manager.promotions import Promotions
from tiering.manager.requests import Request, TierState
from tiering.table.block_table import BlockTable

MAX_RUNS = 128
"""Runs of missing blocks that one search promotes at most; the rest of a prefix with more holes is for a later step."""

UNDECIDED_PATIENCE = 10.0
"""Seconds, from its first open answer on, for which one request waits for tiers that do not know yet."""

_NONE: frozenset[OffloadKey] = frozenset()


@dataclass(slots=True)
class _Walk:
    """The state of one search.

    ``at_least``: hits without which nothing is of use.  ``held_until``: per tier rank, the position up to which the
    tier has said that it holds the keys.  ``pinned``: rows of the readable keys before ``pinned_until``.
    """

    keys: Sequence[OffloadKey]
    at_least: int = 1
    held_until: dict[int, int] = field(default_factory=dict)
    pinned: list[Rows] = field(default_factory=list)
    pinned_until: int = 0
    runs: int = 0


class PrefixSearch:
    """Searches for one manager.  ``call(state, method, *arguments)`` calls a tier and answers None if it raises."""

    def __init__(
        self, table: BlockTable, promotions: Promotions, call: Callable[..., Any], clock: Callable[[], float]
    ) -> None:
        self._table = table
        self._readable = table.readable
        self._pending = table.pending
        self._promotions = promotions
        self._call = call
        self._clock = clock

    def match(self, request: Request, keys: Sequence[OffloadKey], position: int, at_least: int = 1) -> PrefixMatch:
        """Go on from ``position``: the keys before it are readable, the one at it is not.

        Nothing is promoted, and no answer is left open, for a prefix of fewer than ``at_least`` hits.
        """
        walk = _Walk(keys, at_least)
        try:
            return self._walk(request, walk, position)
        finally:
            for rows in walk.pinned:
                self._table.unpin(rows)

    def _walk(self, request: Request, walk: _Walk, position: int) -> PrefixMatch:
        keys, pending = walk.keys, False
        while position < len(keys):
            key = keys[position]
            if key in self._readable:
                position += sum(1 for _ in takewhile(self._readable.__contains__, keys[position:]))
            elif key in request.refused:
                break
            elif key in self._pending:
                run = list(takewhile(self._pending.__contains__, keys[position:]))
                if request.refused:
                    run = list(takewhile(lambda other: other not in request.refused, run))
                self._promotions.join(request, run)
                pending = True
                position += len(run)
            else:
                if walk.runs == MAX_RUNS:
                    return PrefixMatch(position, True)
                walk.runs += 1
                promoted, undecided = self._ask_tiers(request, walk, position)
                if undecided and request.may_wait(self._clock(), UNDECIDED_PATIENCE):
                    return PrefixMatch(position, True)
                if not promoted:
                    break
                pending = True
                position += promoted
        return PrefixMatch(position, pending and position >= walk.at_least)

    def _ask_tiers(self, request: Request, walk: _Walk, position: int) -> tuple[int, bool]:
        """How many keys from ``position``, which the primary tier lacks, are being promoted now; else, is that one undecided."""
        undecided = False
        for state in request.tiers:
            if not state.in_service:
                continue
            end, may_grow = walk.held_until.get(state.rank, 0), False
            if end <= position:
                answer = self._call(state, state.tier.lookup_prefix, walk.keys[position:], request.ctx)
                if answer is None:
                    continue
                end = walk.held_until[state.rank] = position + answer.held
                may_grow = answer.undecided and answer.held < max(
                    state.tier.min_prefix_blocks, walk.at_least - position
                )
            keys = self._run_to_promote(state, request, walk, position, end)
            if keys:
                self._pin_head(walk, position)
                return self._promotions.start(state, request, keys), False
            undecided = undecided or may_grow
        return 0, undecided

    def _run_to_promote(
        self, state: TierState, request: Request, walk: _Walk, position: int, end: int
    ) -> list[OffloadKey]:
        """The leading keys, of those to ``end`` that a tier says it holds, that the primary tier lacks; none if not worth a load."""
        held = walk.keys[position:end]
        keys: Iterable[OffloadKey] = held
        refused, failed = request.refused, request.failed.get(state.rank, _NONE)
        if refused or failed:
            keys = takewhile(lambda key: key not in refused and key not in failed, held)
        rest = iter(keys)
        head = list(islice(rest, state.tier.min_prefix_blocks))
        if len(head) < state.tier.min_prefix_blocks:
            return []
        readable, pending = self._readable, self._pending
        if position + len(held) < walk.at_least and not all(
            key in readable or key in pending for key in walk.keys[end : walk.at_least]
        ):
            return []
        return list(takewhile(lambda key: key not in readable and key not in pending, chain(head, rest)))

    def _pin_head(self, walk: _Walk, position: int) -> None:
        """Promotions must not evict the readable blocks of the same prefix, which they would be worthless without."""
        head = walk.keys[walk.pinned_until : position]
        walk.pinned_until = position
        rows = np.array([row for row in map(self._readable.get, head) if row is not None], np.int64)
        if len(rows):
            self._table.pin(rows)
            walk.pinned.append(rows)
