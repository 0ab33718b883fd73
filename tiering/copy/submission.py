"""The transfers of a step as one submission, divided into chunks that fit the staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tiering.copy.layout import GroupPages


@dataclass(frozen=True, slots=True)
class Order:
    """A transfer that was accepted and has not been submitted."""

    job_id: int
    """Id of the job."""
    plan: list[GroupPages]
    """The blocks and their rows, by KV-cache group."""
    size: int
    """Bytes to move."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one group that are copied together."""

    pages: GroupPages
    """The blocks and their rows."""
    jobs: tuple[int, ...]
    """Indexes of the orders that these blocks belong to."""


def may_run_together(orders: Sequence[Order], *, store: bool) -> bool:
    """Return False if two orders have the same destination: copies of one submission run in any order.

    Args:
        orders: the orders.
        store: True for stores, whose destinations are rows; False for loads, whose destinations are GPU blocks.
    """
    if len(orders) == 1:
        return True
    named: dict[int, list[np.ndarray]] = {}
    for order in orders:
        for pages in order.plan:
            # Block 0 is the engines' null block, which is never read.
            places = np.unique(pages.rows) if store else pages.gpu[pages.gpu != 0]
            named.setdefault(pages.group, []).append(places)
    return all(len(np.unique(np.concatenate(places))) == sum(map(len, places)) for places in named.values())


def chunks_of(orders: Sequence[Order], capacity: Callable[[int], int]) -> list[Chunk]:
    """Divide the blocks of all orders into chunks, group by group.

    Args:
        orders: the orders.
        capacity: largest number of GPU blocks in a chunk, by KV-cache group.
    """
    by_group: dict[int, list[tuple[int, GroupPages]]] = {}
    for job, order in enumerate(orders):
        for pages in order.plan:
            by_group.setdefault(pages.group, []).append((job, pages))
    chunks = []
    for group, parts in sorted(by_group.items()):
        gpu = np.concatenate([pages.gpu for _, pages in parts])
        rows = np.concatenate([pages.rows for _, pages in parts])
        subs = np.concatenate([pages.subs for _, pages in parts])
        owners = np.repeat([job for job, _ in parts], [len(pages.gpu) for _, pages in parts])
        step = capacity(group)
        for a in range(0, len(gpu), step):
            b = a + step
            owned = tuple(dict.fromkeys(owners[a:b].tolist()))
            chunks.append(Chunk(GroupPages(group, gpu[a:b], rows[a:b], subs[a:b]), owned))
    return chunks


def without_repeated_null(pages: GroupPages) -> GroupPages:
    """Keep only the last of several copies to block 0, the engines' null block, which is never read.

    The copies of one batched call must not overlap.
    """
    nulls = np.flatnonzero(pages.gpu == 0)
    if len(nulls) < 2:
        return pages
    keep = np.ones(len(pages.gpu), np.bool_)
    keep[nulls[:-1]] = False
    return GroupPages(pages.group, pages.gpu[keep], pages.rows[keep], pages.subs[keep])
