"""The common epoch of a medium, as a machine without memory finds it or begins it."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.api.namespace import Namespace
from tiering.epochs import machine
from tiering.epochs.driver import drive, request
from tiering.epochs.state import Action, CommonEpoch, Do, Goal, Judged, Walk, WalkOrder
from tiering.medium.block_store import BlockStore


def _walk(store: BlockStore, namespace: Namespace, order: WalkOrder) -> CommonEpoch:
    def do(walk: Walk, action: Action) -> machine.Result:
        return Judged(True, ()) if action.do is Do.JUDGE else request(store, namespace, action)

    return CommonEpoch(drive(order, do).documents)


def find_common(store: BlockStore, namespace: Namespace, known: CommonEpoch | None = None) -> CommonEpoch:
    return _walk(store, namespace, WalkOrder(Goal.LOOK, known=known, writes=False))


def ensure_common(store: BlockStore, namespace: Namespace, invalidations: Sequence[bytes]) -> CommonEpoch:
    return _walk(store, namespace, WalkOrder(Goal.BEGIN, marks=tuple(invalidations)))
