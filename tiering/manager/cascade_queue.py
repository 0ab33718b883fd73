"""The queue of one tier: readable blocks that the tier has admitted and has no credit for yet.

A queued block is a key alone. Its row is looked up when the manager pulls the block, so that a block that was evicted
meanwhile only has to leave the queue. Each request has a lane of its own, in the order of its prefix. Lanes take turns,
so that no request waits for all blocks of another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext

NOBODY = ReqContext("")
"""Context of cascades that belong to no request."""

AT_ONCE = 64
"""Largest number of blocks that one lane gives in its turn."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Queued blocks of one request: a lane of the queue."""

    ctx: ReqContext
    """The request; :data:`NOBODY` once another request has its id."""
    is_fill: bool
    """True for blocks that were promoted from a slower tier."""
    keys: OrderedDict[OffloadKey, None] = field(default_factory=OrderedDict)
    """The blocks, the head of the prefix first."""


class PulledBlocks(NamedTuple):
    """Blocks of one request that leave the queue together."""

    ctx: ReqContext
    """The request."""
    is_fill: bool
    """True for blocks that were promoted from a slower tier."""
    keys: list[OffloadKey]
    """The blocks, the head of the prefix first."""


class RequestEnd(NamedTuple):
    """The end of a request, which a tier sees once no cascade for the request follows."""

    ctx: ReqContext
    """The request."""
    released: Sequence[OffloadKey] = ()
    """Blocks that are evicted first from now on."""
    kept: Sequence[KeptBlocks] = ()
    """Blocks before which others are evicted for a time."""


class CascadeQueue:
    """Queued blocks of one tier, each at most once."""

    __slots__ = ("_finished", "_lanes", "_open", "ended", "lane_of")

    def __init__(self) -> None:
        self._lanes: OrderedDict[QueuedRequest, None] = OrderedDict()
        """The lanes, the one whose turn is next first."""
        self._open: dict[tuple[str, bool], QueuedRequest] = {}
        """Lane of a request's id and ``is_fill``."""
        self.lane_of: dict[OffloadKey, QueuedRequest] = {}
        """Lane of each queued block; only the queue's methods change it, and hot paths read it."""
        self._finished: dict[str, RequestEnd] = {}
        """Requests that have finished and still have blocks here, by id, and the blocks that they release."""
        self.ended: list[RequestEnd] = []
        """Finished requests whose last block has left; the owner of the queue takes them off."""

    def __len__(self) -> int:
        return len(self.lane_of)

    def __contains__(self, key: object) -> bool:
        return key in self.lane_of

    def new(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that are not queued."""
        queued = self.lane_of
        return keys if queued.keys().isdisjoint(keys) else [key for key in keys if key not in queued]

    def append(self, ctx: ReqContext, keys: Sequence[OffloadKey], *, is_fill: bool) -> None:
        """Queue blocks of a request, which are not queued yet, behind its others.

        Args:
            ctx: the request.
            keys: the blocks, in the order of the prefix.
            is_fill: True for blocks that were promoted from a slower tier.
        """
        lane = self._open.get((ctx.req_id, is_fill))
        if lane is None:
            lane = self._open[ctx.req_id, is_fill] = QueuedRequest(ctx, is_fill)
            self._lanes[lane] = None
        blocks: dict[OffloadKey, QueuedRequest] = dict.fromkeys(keys, lane)
        lane.keys.update(OrderedDict.fromkeys(blocks))
        self.lane_of.update(blocks)

    def take(self, most: int) -> PulledBlocks:
        """Remove and return up to ``most`` blocks of the request whose turn it is; the queue is not empty."""
        lane = next(iter(self._lanes))
        most = min(most, AT_ONCE)
        if len(lane.keys) <= most:
            keys = list(lane.keys)
            lane.keys.clear()
        else:
            keys = [lane.keys.popitem(last=False)[0] for _ in range(most)]
            self._lanes.move_to_end(lane)
        for key in keys:
            del self.lane_of[key]
        if not lane.keys:
            self._close(lane)
        return PulledBlocks(lane.ctx, lane.is_fill, keys)

    def drop(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Remove those of ``keys`` that are queued, and return them."""
        gone: list[OffloadKey] = []
        for key in keys:
            lane = self.lane_of.pop(key, None)
            if lane is not None:
                gone.append(key)
                del lane.keys[key]
                if not lane.keys:
                    self._close(lane)
        return gone

    def clear(self) -> list[OffloadKey]:
        """Remove and return all blocks."""
        return self.drop(list(self.lane_of))

    def lanes_from_last(self, most: int) -> list[QueuedRequest]:
        """Return up to ``most`` lanes, the one whose turn is last first."""
        return list(islice(reversed(self._lanes), most))

    def come_next(self, blocks: Iterable[tuple[QueuedRequest, OffloadKey]]) -> None:
        """Give the next turns to blocks whose rows cannot be taken now: the next search looks at others.

        Args:
            blocks: the blocks with their lanes, as :func:`tails_of` has yielded them.
        """
        for lane, key in blocks:
            lane.keys.move_to_end(key, last=False)
            self._lanes.move_to_end(lane, last=False)

    def finish(self, end: RequestEnd) -> bool:
        """Note that a request has finished; return True if some of its blocks are queued."""
        if not any((end.ctx.req_id, is_fill) in self._open for is_fill in (False, True)):
            return False
        self._finished[end.ctx.req_id] = end
        return True

    def disown(self, req_id: str) -> None:
        """Give the blocks of a finished request to no request, because a new one has its id."""
        for is_fill in (False, True):
            lane = self._open.pop((req_id, is_fill), None)
            if lane is not None:
                lane.ctx = NOBODY
        finished = self._finished.pop(req_id, None)
        if finished is not None:
            self.ended.append(finished)

    def _close(self, lane: QueuedRequest) -> None:
        del self._lanes[lane]
        req_id = lane.ctx.req_id
        if self._open.get((req_id, lane.is_fill)) is lane:
            del self._open[req_id, lane.is_fill]
            if req_id in self._finished and (req_id, not lane.is_fill) not in self._open:
                self.ended.append(self._finished.pop(req_id))


def tails_of(lanes: Sequence[QueuedRequest]) -> Iterator[tuple[QueuedRequest, OffloadKey]]:
    """Yield the blocks of ``lanes``, each with its lane, in the order in which they are dropped.

    The second half of each lane comes before the heads of all: a prefix without its tail is of use.
    """
    for start, stop in ((0, 1), (1, 2)):
        for lane in lanes:
            half = (len(lane.keys) + 1) // 2
            for key in islice(reversed(lane.keys), start * half, stop * half):
                yield lane, key
