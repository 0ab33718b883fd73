"""Driver of the way to a common epoch, on the I/O side: does the actions, and reports their results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tiering.api.namespace import Namespace
from tiering.epochs import machine
from tiering.epochs.documents import EpochDocument, epoch_document, new_invalidation, parameters_document
from tiering.epochs.state import Action, CommonEpoch, Do, Goal, Judged, Walk, WalkOrder
from tiering.medium.block_store import BlockStore
from tiering.secondary.contract import TierContext

logger = logging.getLogger("kv_tiering.tier")

SURE_SECONDS = 60.0
"""Seconds since the last look within which lost documents include none that is unknown here.

``kv-tiering epoch new`` watches over its document for as long on a medium that may lose all documents.
"""


def drive(order: WalkOrder, do: Callable[[Walk, Action], machine.Result]) -> Walk:
    """Walk as ``order`` wants, and return the last state of the walk.

    Args:
        order: task of the walk.
        do: function that does an action, and returns its result.

    Raises:
        StoreError: an action failed, or the walk ended without an epoch.
    """
    walk, action = machine.start(order)
    while action.do is not Do.DONE:
        walk, action = machine.step(walk, do(walk, action))
    return walk


def request(store: BlockStore, namespace: Namespace, action: Action) -> machine.Result:
    """Do ``action`` on a shared medium, and return its result."""
    name, document = epoch_document(namespace, action.number), action.document
    if action.do is Do.LIST:
        return _last_number(store, namespace)
    if action.do is Do.PROVE and isinstance(document, bytes):
        store.prove_damage(name, document)
        return None
    if action.do in (Do.READ, Do.CONFIRM):
        # A document is damaged if two reads find it so.
        found = parsed(store.read_document(name), namespace)
        return parsed(store.read_document(name), namespace) if isinstance(found, bytes) else found
    if not isinstance(document, EpochDocument):
        document = EpochDocument.of(namespace.next_epoch(), None, private=False, invalidations=action.marks)
    return parsed(store.create_document(name, document.pack()), namespace)


def parsed(stored: bytes | None, namespace: Namespace, revision: str | None = None) -> EpochDocument | bytes | None:
    """Return the document in ``stored``, or the bytes if it is not one for ``namespace`` and ``revision``."""
    if stored is None:
        return None
    document = EpochDocument.parse(bytes(stored))
    return document if document is not None and document.admits(namespace, revision) else bytes(stored)


def begin_common(store: BlockStore, namespace: Namespace, invalidation: bytes | None = None) -> CommonEpoch:
    """Begin a new common epoch: every older block is foreign to all processes once they notice.

    Running processes notice within a minute, and carry the invalidation over to the other shared media that they use.
    If several processes begin one at once, all get the same, and no block was stored in it before. A person asks for
    this, so that documents that read damaged need no proof.

    Args:
        store: the medium.
        namespace: namespace of the engine's blocks.
        invalidation: identifier of the invalidation, if it concerns several media; default: a new one. Nothing
            happens if the medium has it already.

    Raises:
        StoreError: the document cannot be written or read.
    """
    order = WalkOrder(Goal.BEGIN, marks=(invalidation or new_invalidation(),), proof=False)
    return CommonEpoch(drive(order, lambda walk, action: request(store, namespace, action)).documents)


def _last_number(store: BlockStore, namespace: Namespace) -> int:
    """Return the highest number of an epoch document that the medium lists; -1 if it lists none."""
    first = epoch_document(namespace)
    tails = [name.removeprefix(first) for name in store.list_documents(first)]
    numbers = (int(tail[1:] or 0) for tail in tails if not tail or (tail[0] == "-" and tail[1:].isdecimal()))
    return max(numbers, default=-1)


class CommonHistory:
    """The documents of a medium's common epoch, as this process knows them; used on the I/O side.

    Args:
        context: environment of the tier.
        store: the medium.
        writes: False for a tier that stores nothing, which begins no epoch.
        wall: function that returns seconds since 1970, which pass in a sleep too; default: ``time.time``.
    """

    def __init__(
        self,
        context: TierContext,
        store: BlockStore,
        *,
        writes: bool,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._name, self._namespace, self._agreement = context.name, context.namespace, context.agreement
        self._store = store
        self._writes = writes
        self._clocks = (context.clock, wall)
        self._lock = threading.Lock()
        self._known: CommonEpoch | None = None
        self._seen = (0.0, 0.0)
        """Times at which the last look began that succeeded, one of each clock."""
        self._losses = 0
        """Number of losses so far that may include documents which this process did not know."""
        self._accepted = 0
        """Number of the last of these losses that :meth:`accept` was told of."""
        self._told = False

    def look(self, *, opening: bool = False, used: bool = False) -> CommonEpoch:
        """Return the common epoch, whose blocks are younger than all invalidations that the stack knows.

        An epoch begins if there is none, or if the medium lacks an invalidation. Documents that this process knew and
        that the medium has lost are created again if they include the last one that anybody created. If that is not
        certain, the answer is ``unexplained``, until :meth:`accept`.

        Args:
            opening: True if the tier opens: the last document must be valid, or a new epoch begins; default: False.
            used: True if a process has used the namespace on this medium before; default: False.

        Raises:
            StoreError: the documents cannot be read or written.
        """
        with self._lock:
            began, known = self._times(), self._known
            order = WalkOrder(
                Goal.LOOK, known=known, mark=new_invalidation(), opening=opening, used=used, writes=self._writes
            )
            walk = drive(order, self._do)
            found = CommonEpoch(walk.documents)
            if walk.lost and walk.sure and self._writes:
                parameters = parameters_document(self._namespace)
                if self._store.read_document(parameters) is None:
                    self._store.write_document(parameters, self._namespace.parameters.encode())
            self._losses += walk.lost and not walk.sure
            self._known, self._seen = found, began
            return replace(found, loss=self._losses) if self._losses > self._accepted else found

    def accept(self, found: CommonEpoch) -> CommonEpoch:
        """Return ``found`` without its loss, because the machine holds no block that may be older than it.

        A loss that another look has found later still counts. The scheduler's thread calls this method.
        """
        self._accepted = max(self._accepted, found.loss)
        return replace(found, loss=0)

    def _times(self) -> tuple[float, float]:
        """Return the present time of each clock."""
        monotonic, wall = self._clocks
        return monotonic(), wall()

    def _do(self, walk: Walk, action: Action) -> machine.Result:
        if action.do is Do.JUDGE:
            return Judged(not walk.lost or self._sure(), self._agreement.known)
        if action.do is Do.BEGIN and action.lacking:
            logger.warning(
                "tier %s: its medium lacks a new epoch that the stack knows of; the epoch begins there now", self._name
            )
        elif action.do is Do.BEGIN and walk.order.used and not (action.number or walk.order.known or self._told):
            self._told = True
            logger.warning(
                "tier %s: document %s is missing: a new epoch begins, and no block that was stored before is served",
                self._name,
                epoch_document(self._namespace),
            )
        return request(self._store, self._namespace, action)

    def _sure(self) -> bool:
        """Return True if the documents that were lost include none that is unknown here."""
        # The loss happened at any time until now; reading may have taken long. Monotonic time stops while the machine
        # sleeps, and a wall clock may be set back: the larger of the two spans counts.
        unseen = max(now - seen for now, seen in zip(self._times(), self._seen, strict=True))
        sure = unseen <= SURE_SECONDS or self._agreement.vouched(self._name)
        logger.warning(
            "tier %s: its medium has lost documents of its common epoch, as after a restart, a flush or the return to "
            "an older copy; %s",
            self._name,
            "they are written again"
            if sure
            else "whether a new epoch had begun is unknown, so the engine drops all blocks that were stored before",
        )
        return sure
