"""Blocks that are cascaded for a request as soon as another request has finished writing them."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.requests import Request
from tiering.table.block_table import BlockTable


class AwaitedBlocks:
    """Per request, the blocks that are pending in the primary table and must be cascaded for that request.

    A tier with the request-level policy wants all blocks of a request, also those that another request is storing.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._awaited: dict[Request, dict[OffloadKey, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def __contains__(self, request: object) -> bool:
        return request in self._awaited

    def add(self, request: Request, keys: Sequence[OffloadKey], own: Sequence[OffloadKey]) -> None:
        """Note the blocks that ``request`` needs and other requests are writing.

        Args:
            request: the request that a tier wants all blocks of.
            keys: all blocks of the store, in their order.
            own: the part of ``keys`` that this request writes itself; its own store cascades them.
        """
        pending = self._table.pending
        if len(pending) > len(own):
            others = [key for key in keys if key in pending]
            awaited = dict.fromkeys(set(others).difference(own))
            if awaited:
                self._awaited.setdefault(request, {}).update((key, None) for key in others if key in awaited)

    def take(self) -> list[tuple[Request, list[OffloadKey]]]:
        """Take the blocks that are no longer pending.

        Returns:
            Each request with at least one such block, and those of its blocks that became readable. The list is empty
            if all of them failed. Failed blocks are not awaited any longer.
        """
        readable, pending = self._table.readable, self._table.pending
        decided = []
        for request, keys in list(self._awaited.items()):
            left = {key: None for key in keys if key in pending}
            if len(left) < len(keys):
                decided.append((request, [key for key in keys if key in readable]))
                if left:
                    self._awaited[request] = left
                else:
                    del self._awaited[request]
        return decided

    def forget(self, request: Request) -> None:
        """Stop waiting for blocks of ``request``."""
        self._awaited.pop(request, None)
