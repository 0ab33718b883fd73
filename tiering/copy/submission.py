"""The transfers of a step as one submission, divided into chunks that fit the staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tiering.copy.layout import GroupPages


class Order(NamedTuple):
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
        pages, step = joined([pages for _, pages in parts]), capacity(group)
        ends = list(accumulate(len(pages.gpu) for _, pages in parts))
        starts = [0, *ends[:-1]]
        for a in range(0, ends[-1], step):
            b = min(a + step, ends[-1])
            owners = dict.fromkeys(job for (job, _), c, d in zip(parts, starts, ends, strict=True) if c < b and a < d)
            chunks.append(Chunk(GroupPages(group, pages.gpu[a:b], pages.rows[a:b], pages.subs[a:b]), tuple(owners)))
    return chunks


def joined(parts: Sequence[GroupPages]) -> GroupPages:
    """Return several parts of one group as one."""
    if len(parts) == 1:
        return parts[0]
    groups, *arrays = zip(*parts, strict=True)
    return GroupPages(groups[0], *map(np.concatenate, arrays))
