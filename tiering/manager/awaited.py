"""Blocks that a tier wants of a request while somebody else is still writing them: they are cascaded as soon as they are readable."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.api.keys import OffloadKey
from tiering.manager.requests import Request
from tiering.table.block_table import BlockTable


class AwaitedBlocks:
    """Remembers, per request, the blocks that are pending in the primary table and are to be cascaded for it."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._awaited: dict[Request, dict[OffloadKey, None]] = {}

    def __contains__(self, request: object) -> bool:
        return request in self._awaited

    def add(self, request: Request, keys: Sequence[OffloadKey], own: Sequence[OffloadKey]) -> None:
        """``request`` waits for those of ``keys`` that others write; ``own`` are those that it writes itself."""
        pending = self._table.pending
        if len(pending) > len(own):
            others = [key for key in keys if key in pending]
            awaited = dict.fromkeys(set(others).difference(own))
            if awaited:
                self._awaited.setdefault(request, {}).update((key, None) for key in others if key in awaited)

    def take(self) -> list[tuple[Request, list[OffloadKey]]]:
        """Requests for which something is decided, and what has become readable of it; what failed is forgotten."""
        if not self._awaited:
            return []
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
        """Nothing more is cascaded for ``request``."""
        self._awaited.pop(request, None)
