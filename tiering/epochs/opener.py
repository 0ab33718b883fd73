"""Opening of a medium on the I/O side: the store, the namespace's parameters, and the epoch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tiering.api.namespace import NO_EPOCH, Namespace
from tiering.epochs.documents import (
    LEASES,
    MAX_COMMON,
    MAX_REMEMBERED,
    PARAMETERS,
    EpochDocument,
    epoch_document,
    lease_document,
    parameters_document,
    parse_parameters,
)
from tiering.epochs.driver import CommonHistory, drive, parsed
from tiering.epochs.machine import Result
from tiering.epochs.nearest import log_nearest
from tiering.epochs.state import Action, Do, Entered, Goal, Target, Walk, WalkOrder
from tiering.errors import DeviceError, PermanentStoreError, StoreError
from tiering.medium.block_store import BlockStore
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import TierContext

logger = logging.getLogger("kv_tiering.tier")

_LOG_PERIOD = 30.0

_THREAD_RETRY_SECONDS = 0.01
_THREAD_WAIT_SECONDS = 1.0
"""Seconds for which closing retries to start its thread."""


class Opener:
    """Opens a store and enters the epochs of its namespace; used on the I/O side by one thread at a time.

    Args:
        context: environment of the tier.
        store: the medium.
        shared: True if other processes use the medium too, so that their documents are never replaced or removed.
        writes: False for a tier that stores nothing; until a reset, such a tier also works with a read-only medium.
    """

    def __init__(self, context: TierContext, store: BlockStore, *, shared: bool = False, writes: bool = True) -> None:
        self._name, self._namespace, self._revision = context.name, context.namespace, context.revision
        self._store = store
        self._writes = writes
        self._opened = False
        self._unproven = True
        """True if no epoch was entered since the store was opened."""
        self._closer: threading.Thread | None = None
        self._told: set[str] = set()
        """Documents whose loss or absence was logged since the last success; retries do not repeat it."""
        self._agreement = context.agreement
        self.history = CommonHistory(context, store, writes=writes)
        """Documents of the common epoch of a shared medium."""
        self._guard = threading.Lock()
        """Held while the document of a medium of its own is read or written."""
        self._document: EpochDocument | None = None
        """The document of a medium of its own, as it should be on the medium; None: not read yet."""
        self.begun = b""
        """Epoch that this process began on a medium of its own; empty if the epoch is older than the process."""
        self._refusals = RateLimit(_LOG_PERIOD, time.monotonic)
        self._unwritten = RateLimit(_LOG_PERIOD, time.monotonic)
        self.shared = shared

    @property
    def recorded(self) -> Mapping[bytes, bytes]:
        """The common epochs, by medium, in which the blocks of a medium of its own were stored."""
        document = self._document
        return {} if document is None else dict(document.common)

    @property
    def invalidations(self) -> tuple[bytes, ...]:
        """The invalidations that the blocks of a medium of its own are younger than, as recorded there."""
        document = self._document
        return () if document is None else document.invalidations

    def successor(self) -> Target:
        """Return a new epoch for the blocks from now on, computed with the weights of the start."""
        return Target(self._namespace.next_epoch(), self._revision)

    def target(self, revision: str | None) -> Target:
        """Return the target of a reset: the epoch of ``revision``, or an epoch that no other process has.

        Raises:
            ConfigError: the revision is not valid.
        """
        if revision is not None:
            named = self._namespace.revision_epoch(revision)
            if self.shared:
                return Target(named, revision)
        return Target(self._namespace.next_epoch(), revision, private=revision is None)

    def enter(self, target: Target | None) -> Entered:
        """Open the store unless it is open, and return the epoch that was entered.

        Without a ``target`` this is the epoch of the blocks on the medium. An epoch that another process began by a
        reset belongs to that process. In this case a fresh epoch begins, for this process and later ones.

        With a ``target`` (a reset) this is the epoch of ``target``. Once the method has returned, no process that
        starts later reads blocks stored before.

        Raises:
            StoreError: the medium cannot be used; the method may be called again.
        """
        if not self._opened:
            self._store.open()
            self._opened = self._unproven = True
        try:
            entered = self._enter(target)
        except BaseException:
            if self._unproven and not self.shared:
                # Nothing uses the store yet. The next attempt opens what is at its place by then: whoever repairs a
                # directory may remove it, or put another one there.
                self._opened = False
                self._store.close()
            raise
        self._unproven = False
        return entered

    def _enter(self, target: Target | None) -> Entered:
        """Return the epoch that was entered on the open store."""
        if target is not None and not self.shared:
            # First, so that blocks stored before are foreign from here on, whatever else fails.
            self._walk(target, Goal.RESET)
        known, intact = self._check_parameters()
        if target is not None:
            entered = Entered(target.namespace)
        elif not self.shared:
            entered = Entered(self._walk(self.successor(), Goal.OWN, known=known))
        elif self._revision is not None:
            entered = Entered(self._namespace.revision_epoch(self._revision))
            if known:
                self._compare_revisions(entered.namespace)
        else:
            entered = self._enter_common(used=known)
        if not intact and self._writes:
            # After the epoch, because parameters without an epoch mean that the epoch was lost.
            self._store.write_document(parameters_document(self._namespace), self._namespace.parameters.encode())
        self._told.clear()
        return entered

    def needs_lease(self, entered: Entered) -> bool:
        """Return True if blocks are stored in the entered epoch and no epoch document names it."""
        return self.shared and self._writes and entered.common is None

    def forget(self) -> None:
        """Record that the store was closed: :meth:`enter` opens it again."""
        self._opened = False
        self.begun = b""

    def close(self, timeout: float, after: Callable[[], None] | None = None) -> None:
        """Close the store in a thread: a hanging medium must not delay the process.

        Args:
            timeout: maximum seconds to wait for the thread.
            after: function that blocks until nothing uses the store any more; default: nothing uses the store now.
        """

        def close() -> None:
            try:
                if after is not None:
                    after()
                self._store.close()
            except Exception:
                logger.exception("tier %s: closing its store failed", self._name)

        end = time.monotonic() + max(timeout, 0.0)
        give_up = min(end, time.monotonic() + _THREAD_WAIT_SECONDS)
        while self._closer is None:
            thread = threading.Thread(target=close, name=f"kv-{self._name}-close", daemon=True)
            try:
                thread.start()
                self._closer = thread
                break
            except RuntimeError as error:
                # The process may have no more threads for the moment; the tier's own have just ended.
                if time.monotonic() >= give_up:
                    logger.error("tier %s: its store is left to the end of the process: %s", self._name, error)
                    return
            time.sleep(_THREAD_RETRY_SECONDS)
        self._closer.join(max(end - time.monotonic(), 0.0))
        if self._closer.is_alive() and after is None:
            logger.error("tier %s: its store did not close in time; it closes when its I/O has ended", self._name)

    def _walk(self, target: Target, goal: Goal, *, known: bool = True) -> Namespace:
        """Walk to the epoch of the medium; to that of ``target`` if there is none, or for a reset."""
        # A record of the older epoch that is being written must not come after the removal.
        with self._guard:
            if goal is Goal.RESET:
                self._document, self.begun = self._content(target), target.namespace.epoch
            walk = drive(WalkOrder(goal), lambda walk, action: self._do(walk, action, target, known))
            if walk.documents and (found := walk.documents[0]) is not None:
                return self._namespace.with_epoch(found.epoch)
            return target.namespace

    def _do(self, walk: Walk, action: Action, target: Target, known: bool) -> Result:
        """Do an action on a medium that only this tier writes."""
        name, reset = epoch_document(self._namespace), walk.order.goal is Goal.RESET
        if action.do is Do.READ:
            stored = self._store.read_document(name)
            self._document = None if stored is None else EpochDocument.parse(bytes(stored))
            found = parsed(stored, self._namespace, self._revision)
            if self._document is None:
                self._tell_loss(name, missing=stored is None, known=known)
            elif isinstance(found, EpochDocument) and not known:
                self._tell_rewritten(parameters_document(self._namespace), "missing")
            elif not reset and self._document.is_of_another(self._revision):
                self._tell_revision()
            return found
        try:
            if action.do is Do.REMOVE:
                self._store.remove_document(name)
            else:
                content = (self._document if reset else None) or self._content(target)
                if reset or self._writes:
                    self._store.write_document(name, content.pack())
                self._document, self.begun = content, target.namespace.epoch
        except StoreError as error:
            limit, outcome = (
                (self._refusals, "removed for a reset; it is tried again")
                if action.do is Do.REMOVE
                else (self._unwritten, "written; the reset holds, and the next start begins empty")
            )
            if reset and walk.sure and (count := limit.admit()):
                logger.warning(
                    "tier %s: document %s could not be %s: %s (%d such failure(s))",
                    self._name,
                    name,
                    outcome,
                    error,
                    count,
                )
            return error
        return None

    def _content(self, target: Target) -> EpochDocument:
        """Return the document of ``target``, in which blocks are stored from now on.

        The record keeps the common epochs of media that were not met yet: one that is still current has not moved.
        """
        met = {medium: found.epoch for medium, found in self._agreement.met.items()}
        common = {**self.recorded, **met}
        # The blocks that the record spoke of are foreign in the new epoch; what it knew of invalidations stays.
        known = tuple(dict.fromkeys((*self.invalidations, *self._agreement.known)))[-MAX_REMEMBERED:]
        return EpochDocument.of(
            target.namespace, target.revision, private=target.private, common=common, invalidations=known
        )

    def record(self, namespace: Namespace, met: Mapping[bytes, bytes], invalidations: tuple[bytes, ...]) -> None:
        """Record what the blocks in the epoch of ``namespace`` are known to be younger than.

        The call has no effect if the medium is in another epoch by now.

        Args:
            namespace: namespace in the epoch of the blocks.
            met: common epochs in which the blocks were stored, by medium.
            invalidations: all invalidations that the blocks are younger than.

        Raises:
            StoreError: the document cannot be written.
        """
        with self._guard:
            document = self._document
            if document is None or document.epoch != namespace.epoch:
                return
            common = {medium: epoch for medium, epoch in document.common if medium not in met} | dict(met)
            content = replace(
                document,
                common=tuple(common.items())[-MAX_COMMON:],
                invalidations=invalidations[-MAX_REMEMBERED:],
            )
            if self._writes and not content.private:
                self._store.write_document(epoch_document(self._namespace), content.pack())
            self._document = content

    def _enter_common(self, *, used: bool) -> Entered:
        """Enter the common epoch of all processes without a revision; the first process begins it."""
        found = self.history.look(opening=True, used=used)
        for number, document in enumerate(found.documents):
            if document is None:
                self._tell_loss(epoch_document(self._namespace, number), missing=False, known=True)
        return Entered(self._namespace.with_epoch(found.epoch or NO_EPOCH), found)

    def _compare_revisions(self, own: Namespace) -> None:
        """Find out by the epochs that the medium knows if it has blocks of other revisions alone."""
        try:
            leases = set(self._store.list_documents(f"{LEASES}{own.directory}-"))
            if lease_document(own) not in leases and (leases or self._store.read_document(epoch_document(own))):
                self._tell_revision()
        except StoreError as error:
            logger.info("tier %s: the epochs that its medium knows cannot be listed: %s", self._name, error)

    def _tell_loss(self, document: str, *, missing: bool, known: bool) -> None:
        """Log that blocks which may be on the medium are foreign.

        ``known``: a process has used the namespace before.
        """
        if document in self._told:
            return
        self._told.add(document)
        if missing and not known:
            logger.info("tier %s: the namespace is new here; its first epoch begins", self._name)
        else:
            logger.warning(
                "tier %s: document %s is %s: a new epoch begins, and no block that was stored before is served",
                self._name,
                document,
                "missing" if missing else "damaged",
            )

    def _check_parameters(self) -> tuple[bool, bool]:
        """Return if the medium has a document with the namespace's parameters, and if that is intact.

        A damaged document is written again, and no reason to refuse: every block names its namespace by itself.

        Raises:
            PermanentStoreError: the document holds other parameters. One fingerprint for two sets of parameters would
                mix the blocks of two models.
        """
        document = parameters_document(self._namespace)
        expected = self._namespace.parameters.encode()
        try:
            stored = self._store.read_document(document)
        except DeviceError:
            stored = b""
        if stored is None:
            if document not in self._told:
                self._told.add(document)
                nearest = log_nearest(self._name, self._store, self._namespace.parameters, PARAMETERS)
                if nearest:
                    self._agreement.cold_starts[self._name] = nearest
            return False, False
        if bytes(stored) == expected:
            return True, True
        if parse_parameters(bytes(stored)) is not None:
            raise PermanentStoreError(
                f"document {document} holds other parameters than this engine's under the same fingerprint: "
                "it is not ours; inspect it, and remove it (and the blocks of this namespace) if it is not needed"
            )
        self._tell_rewritten(document, "damaged")
        return True, False

    def _tell_revision(self) -> None:
        """Log that the medium has blocks of another revision alone."""
        if self._name not in self._agreement.cold_starts:
            self._agreement.cold_starts[self._name] = "revision"
            logger.warning("tier %s: begins empty, because its blocks were stored with another revision", self._name)

    def _tell_rewritten(self, document: str, state: str) -> None:
        """Log that the parameters, which only people read, are written again beside blocks that are served."""
        told = f"{document} {state}"
        if told not in self._told:
            self._told.add(told)
            rest = "it is written again" if self._writes else "this tier stores nothing, so it stays as it is"
            logger.warning("tier %s: document %s, which names this model, is %s: %s", self._name, document, state, rest)
