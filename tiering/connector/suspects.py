"""Suspects: GPU blocks whose KV must not be stored, because it may not match their hashes.

A block becomes a suspect in several ways. A load of another connector did not fill the block, or a load filled it with
the KV of another adapter than the worker computes with. The block was computed on top of such a block. Or it was in the
engine's own cache when the tiers were reset, so that it may hold the KV of other weights.

A suspect is trusted again when the engine fills it again. This happens when the block is allocated to a request whose
earlier blocks are all trusted, or when the engine has gone back and recomputes the block. A request that finds a
suspect in the engine's cache is not stored from that block on. The blocks that the request computes behind the suspect
are suspects too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, Protocol

Tables = Sequence[Sequence[int]]
"""GPU block ids of one request by KV-cache group, in logical order, null blocks (0) included."""

STEPS_IN_FLIGHT = 16
"""Number of steps for which the block tables of ended and preempted requests are kept.

No engine has as many steps in flight.
"""


class EngineBlockPool(Protocol):
    """The engine's own pool of GPU blocks.

    Each block has the attributes ``block_id``, ``is_null``, ``ref_cnt`` (number of users) and ``block_hash`` (its key
    in the engine's cache, or None).
    """

    @property
    def blocks(self) -> Sequence[Any]:
        """All blocks, by their id."""


class SuspectBlocks:
    """The suspects among the GPU blocks of one engine; true if there are any.

    Without suspects, which is the normal state, no call costs anything per block.

    Args:
        block_sizes: tokens in a GPU block of each KV-cache group.
    """

    __slots__ = ("_given_up", "_ids", "_sizes", "_trusted")

    def __init__(self, block_sizes: Iterable[int]) -> None:
        self._sizes = tuple(block_sizes)
        self._ids: set[int] = set()
        """The suspects, if ``_trusted`` is None."""
        self._trusted: set[int] | None = None
        """The only blocks that are not suspects; None if ``_ids`` are the suspects.

        Used after a reset of an engine whose cache cannot be inspected.
        """
        self._given_up: deque[tuple[int, Tables]] = deque()
        """Block tables of ended and preempted requests, each with the step after which they were given up."""

    def __bool__(self) -> bool:
        return bool(self._ids) or self._trusted is not None

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._ids if self._trusted is None else block_id != 0 and block_id not in self._trusted

    def give_up(self, tables: Tables, step: int) -> None:
        """Keep the block tables of a request that loses its blocks after ``step`` was scheduled.

        Steps in flight may still report that a load did not fill some of these blocks.
        """
        self._forget(step)
        if any(tables):
            self._given_up.append((step, tables))

    def spread(self, unfilled: Collection[int], requests: Iterable[Tables], step: int) -> set[int]:
        """Mark blocks as suspects, and all blocks behind one of them in any request.

        Args:
            unfilled: blocks that a load did not fill.
            requests: block tables of the requests that have blocks; tables that were given up are searched too.
            step: the last step that was scheduled.

        Returns:
            All blocks found, including those computed on top of another request's suspects.
        """
        self._forget(step)
        wrong = set(unfilled)
        left = [*requests, *(tables for _, tables in self._given_up)]
        before = -1
        while len(left) != before:
            before, rest = len(left), []
            for tables in left:
                first = self.first_token(tables, wrong)
                if first is None:
                    rest.append(tables)
                else:
                    wrong.update(*self._behind(tables, first))
            left = rest
        wrong.discard(0)
        self._suspect(wrong)
        return wrong

    def first_token(self, tables: Tables, among: Container[int]) -> int | None:
        """Return the first token of a request whose block is in ``among``; None if there is none."""
        firsts = []
        for table, size in zip(tables, self._sizes, strict=True):
            if isinstance(among, set) and among.isdisjoint(table):
                continue
            position = next((index for index, block in enumerate(table) if block and block in among), None)
            if position is not None:
                firsts.append(position * size)
        return min(firsts, default=None)

    def reset(self, pool: EngineBlockPool | None) -> None:
        """Mark all blocks whose KV is from before a reset of the tiers.

        Args:
            pool: the engine's block pool, whose cached or used blocks are marked; None: all blocks are marked.
        """
        if pool is None:
            self._trusted = set()
            return
        self._trusted = None
        self._ids = {
            block.block_id
            for block in pool.blocks
            if (block.ref_cnt > 0 or block.block_hash is not None) and not block.is_null
        }

    def assigned(self, known: Tables, tables: Tables, found_tokens: int | None, invalid_from: int | None) -> int | None:
        """Process the new block tables of a request; return its first token that must not be stored.

        Without suspects and ``invalid_from``, the call is not needed.

        Args:
            known: block tables that the request had before; empty for a request that starts.
            tables: block tables that the request has now.
            found_tokens: tokens that the request found in the engine's cache; all other blocks are filled for the
                request. None if the request was not matched since it started over: then it may have found or may fill
                any of its blocks.
            invalid_from: result of the previous call.

        Returns:
            The first token that must not be stored; None if all tokens may be stored.
        """
        starts = [len(old) for old in known]
        if any(map(_differ, known, tables)):
            starts, found_tokens = [], None
        if not any(starts):
            starts = [
                len(table) if found_tokens is None else found_tokens // size
                for table, size in zip(tables, self._sizes, strict=True)
            ]
            found = [table[:start] for table, start in zip(tables, starts, strict=True)]
            invalid_from = self.first_token(found, self) if self else None
            if found_tokens is None and invalid_from is not None:
                # The request may as well fill some of the blocks behind the suspect.
                self.filled(self._behind(tables, invalid_from), invalid_from)
        self.filled([table[start:] for table, start in zip(tables, starts, strict=True)], invalid_from)
        return invalid_from

    def filled(self, blocks: Tables, invalid_from: int | None) -> None:
        """Process blocks that a request fills behind those that it has.

        Args:
            blocks: the blocks, by KV-cache group.
            invalid_from: first token of the request that must not be stored; None: the blocks are trusted.
        """
        if not self and invalid_from is None:
            return
        for ids in blocks:
            if invalid_from is None:
                self._trust(ids)
            else:
                self._suspect(block for block in ids if block)

    def recomputed(self, tables: Tables, invalid_from: int, end: int) -> int | None:
        """Trust the blocks that a request computes again in this step, after it has gone back.

        Args:
            tables: block tables of the request.
            invalid_from: first token that must not be stored.
            end: end of the tokens that the step computes.

        Returns:
            The first token that still must not be stored; None if all blocks of the request are trusted again.
        """
        if not self:
            return None
        end = max(end, invalid_from)
        for table, size in zip(tables, self._sizes, strict=True):
            self._trust(table[invalid_from // size : end // size])
        return end if self.first_token(self._behind(tables, end), self) is not None else None

    def _forget(self, step: int) -> None:
        given_up = self._given_up
        while given_up and given_up[0][0] < step - STEPS_IN_FLIGHT:
            given_up.popleft()

    def _behind(self, tables: Tables, token: int) -> list[Sequence[int]]:
        """Return the blocks from the block of ``token`` on, by KV-cache group."""
        return [table[token // size :] for table, size in zip(tables, self._sizes, strict=True)]

    def _suspect(self, block_ids: Iterable[int]) -> None:
        if self._trusted is None:
            self._ids.update(block_ids)
        else:
            self._trusted.difference_update(block_ids)

    def _trust(self, block_ids: Iterable[int]) -> None:
        if self._trusted is None:
            self._ids.difference_update(block_ids)
        else:
            self._trusted.update(block_ids)


def _differ(known: Sequence[int], table: Sequence[int]) -> bool:
    """Return True if ``table`` does not continue ``known``.

    A null block replaces a block that a sliding window has passed.
    """
    return len(table) < len(known) or any(old and new and old != new for old, new in zip(known, table, strict=False))
