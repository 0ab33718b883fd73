"""Looks into a table's lists, which nothing but tests needs."""

from __future__ import annotations

import numpy as np

from tiering.table.block_table import BlockTable
from tiering.table.free_rows import FREE
from tiering.table.policies.arc import ARCEvictionPolicy
from tiering.table.policies.recency import LRUEvictionPolicy, RecencyLog


def recent_rows(log: RecencyLog) -> list[int]:
    """Return all rows of a list, pinned ones included, the most recent first."""
    stamps = log._clock.stamps
    parts = [np.flatnonzero(log._parked)]
    for rows, entry_stamps in log._returned:
        parts.append(rows[stamps[rows] == entry_stamps])
    for chunk in log._chunks:
        rows = chunk.rows[chunk.start : chunk.end].astype(np.int64)
        parts.append(rows[stamps[rows] == chunk.stamps[chunk.start : chunk.end]])
    found = np.concatenate(parts)
    return [int(row) for row in found[np.argsort(-stamps[found])]]


def known_rows(table: BlockTable) -> list[int]:
    """Return all rows that a table's policy knows; those of ARC's T2 come before those of T1."""
    policy = table.policy
    if isinstance(policy, ARCEvictionPolicy):
        return recent_rows(policy._t2) + recent_rows(policy._t1)
    assert isinstance(policy, LRUEvictionPolicy)
    return recent_rows(policy._log)


def listed_rows(table: BlockTable) -> list[int]:
    """Return the free rows in a table's list, the first to be reserved last."""
    free = table.free_rows
    entries = free._rows[: free._listed]
    return [int(row) for row in entries[table.refs[entries] == FREE]]
