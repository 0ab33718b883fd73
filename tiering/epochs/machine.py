"""The way to the epoch of a medium, as a pure function from a state and a result to the next state.

:mod:`tiering.epochs.driver` does the actions. A request that fails ends the walk, as a crash does; the next walk starts
over. A walk on a shared medium::

    known ----> CONFIRM --same--> READ <---- document, proven damage, or missing before later ones
                   |               ^ | \\
       another one +---------------+ |  +--damaged--> PROVE (without a proof, the walk ends)
    nothing known -----------------+ +--none--> LIST --later ones are listed--> READ
                                                  |
                 RESTORE <--lost, seen just now-- JUDGE --enough--> DONE
    (creates the lost ones, then: READ)           |                  ^
                                                  v                  | same
                                      BEGIN (conditional put) --> CONFIRM --another one--> READ

A walk on a medium that only one tier writes::

    opening: READ --valid--> DONE                         reset: REMOVE ---> WRITE --written or removed--> DONE
              +--missing, damaged, of others--> WRITE --> DONE

The documents of a shared medium are numbered and never replaced. The last one counts, and a new epoch begins by the
creation of the next document. A damaged document stays, because another process may be able to read it; if it is the
last one, the next process that starts begins a new epoch. A reset removes the old document first: that works on a full
disk, and blocks without a document are foreign.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tiering.epochs.documents import EpochDocument
from tiering.epochs.state import Action, CommonEpoch, Do, EpochVerdict, Goal, Judged, Walk, WalkOrder
from tiering.errors import PermanentStoreError, StoreError, TemporaryStoreError

MAX_DOCUMENTS = 10_000
"""Maximum number of epoch documents of one namespace."""

_ATTEMPTS = 32
"""Maximum number of documents that one walk tries to create while others create documents too."""

Result = EpochDocument | bytes | int | Judged | StoreError | None
"""Result of an action, see :class:`Do`."""
Step = tuple[Walk, Action]


def start(order: WalkOrder) -> Step:
    """Return the first state of a walk, and its first action."""
    walk = Walk(order)
    if order.goal is Goal.RESET:
        return _do(walk, Do.REMOVE)
    if order.known is not None and order.known.epoch is not None:
        return _confirm(walk, order.known)
    return _read(walk)


def step(walk: Walk, result: Result) -> Step:
    """Return the state of a walk after ``result``, and its next action.

    Raises:
        StoreError: the walk ends without an epoch, and may be started again.
    """
    match walk.do, result:
        case Do.READ, EpochDocument() | bytes() | None if walk.order.goal is Goal.OWN:
            if isinstance(result, EpochDocument):
                return _do(replace(walk, documents=(result,)), Do.DONE)
            return _do(replace(walk, sure=False), Do.WRITE)
        case Do.READ, EpochDocument() | bytes() | None:
            return _document(walk, result)
        case Do.CONFIRM, EpochDocument() | bytes() | None:
            same = walk.subject.documents[walk.number] == (None if isinstance(result, bytes) else result)
            if same and walk.number + 1 < walk.subject.count:
                return _do(walk, Do.CONFIRM, walk.number + 1)
            if walk.attempts:
                return _found(walk, walk.subject) if same else _retry(walk)
            return _read(walk, walk.subject.documents if same else ())
        case Do.LIST, int(last):
            walk = replace(walk, listed=last)
            return _read(walk, walk.documents) if last >= walk.number else _found(walk, CommonEpoch(walk.documents))
        case Do.PROVE, None:
            return _read(walk, (*walk.documents, None))
        case Do.JUDGE, Judged(sure, marks):
            walk = replace(walk, marks=marks, judged=True, sure=sure)
            found, known = CommonEpoch(walk.documents), walk.order.known
            if walk.lost and sure and walk.order.writes and known and known.count > found.count:
                return _restore(walk, found.count) if known.continues(found) else _needs(walk, found)
            return _needs(walk, found)
        case Do.RESTORE, _ if walk.order.known is not None:
            # If somebody has begun another epoch in this place, older documents after it would end that epoch.
            same = result == walk.order.known.documents[walk.number]
            return _restore(walk, walk.number + 1) if same else _read(walk)
        case Do.BEGIN, EpochDocument():
            # If the medium went back to an older copy meanwhile, the document stands after a gap, and others do not
            # see it.
            return _confirm(replace(walk, attempts=walk.attempts + 1), CommonEpoch((*walk.documents, result)))
        case Do.BEGIN, _:
            return _retry(replace(walk, attempts=walk.attempts + 1))
        case Do.REMOVE, _:
            return _do(replace(walk, sure=result is None), Do.WRITE)
        case Do.WRITE, _:
            if isinstance(result, StoreError) and not walk.sure:
                raise result
            return _do(walk, Do.DONE)
    raise ValueError(f"{result!r} is no result of {walk.do}")


def judge(present: CommonEpoch, found: CommonEpoch, known: Collection[bytes]) -> EpochVerdict:
    """Return what a tier in the common epoch ``present`` does about ``found``.

    Args:
        present: the common epoch that the tier is in.
        found: the common epoch that the medium has now.
        known: the invalidations that the tiers of the stack have met.
    """
    if found.unexplained or not set(found.invalidations).issubset(known):
        return EpochVerdict.FOLLOW
    if not found.covers(known):
        return EpochVerdict.REOPEN
    return EpochVerdict.STAY if found.epoch == present.epoch else EpochVerdict.ENTER


def _do(walk: Walk, do: Do, number: int = 0, document: EpochDocument | bytes | None = None) -> Step:
    return replace(walk, do=do, number=number), Action(do, number, document)


def _confirm(walk: Walk, subject: CommonEpoch) -> Step:
    """Read the last two documents of ``subject`` again.

    The last one alone does not show that the medium has lost older ones, before or after its creation.
    """
    return _do(replace(walk, subject=subject), Do.CONFIRM, max(subject.count - 2, 0))


def _read(walk: Walk, documents: tuple[EpochDocument | None, ...] = ()) -> Step:
    """Read the document after ``documents``; a walk that starts over lists them again."""
    if len(documents) >= MAX_DOCUMENTS:
        raise PermanentStoreError(f"the namespace has {MAX_DOCUMENTS} epoch documents; use another one")
    listed = walk.listed if documents or walk.do is Do.LIST else None
    return _do(replace(walk, documents=documents, listed=listed), Do.READ, len(documents))


def _document(walk: Walk, document: EpochDocument | bytes | None) -> Step:
    if document is None and walk.listed is None:
        # The epoch before a document that was lost must not come back, nor a new one begin before later ones. It must
        # not go on either, in a process that has not read the document before the loss.
        return _do(walk, Do.LIST, walk.number)
    if document is None and walk.number >= (walk.listed or 0):
        return _found(walk, CommonEpoch(walk.documents))
    if walk.order.proof and isinstance(document, bytes):
        # All machines lose their blocks with a new epoch. A faulty way to one of them must not begin one.
        return _do(walk, Do.PROVE, walk.number, document)
    # Blocks of the epoch before a damaged document must not come back: if the document stays the last one, a new epoch
    # begins.
    return _read(walk, (*walk.documents, None if isinstance(document, bytes) else document))


def _found(walk: Walk, found: CommonEpoch) -> Step:
    """Act on the documents that the medium has."""
    walk, order = replace(walk, documents=found.documents), walk.order
    if order.goal is Goal.BEGIN:
        walk = replace(walk, marks=order.marks)
        return _do(walk, Do.DONE) if _enough(walk, found) else _begin(walk, found)
    if walk.judged:
        return _needs(walk, found)
    return _do(replace(walk, lost=order.known is not None and not found.continues(order.known)), Do.JUDGE)


def _restore(walk: Walk, number: int) -> Step:
    """Create document ``number`` again, which the medium has lost; read all of them if it is the end."""
    known = walk.order.known or CommonEpoch()
    document = known.documents[number] if number < known.count else None
    return _read(walk) if document is None else _do(walk, Do.RESTORE, number, document)


def _needs(walk: Walk, found: CommonEpoch) -> Step:
    """Begin a new epoch if there is none, or if the one found lacks an invalidation."""
    order = walk.order
    # Another process may be able to read the document that seems to be damaged.
    undecided = found.epoch is None and found.count > 0
    if _enough(walk, found) or (not order.opening and (undecided or not order.writes)):
        return _do(walk, Do.DONE)
    if not order.writes:
        reason = (
            "nothing was stored in this namespace yet"
            if found.epoch is None
            else "the medium has not begun the new epoch that another tier of the stack is in"
        )
        raise TemporaryStoreError(f"epoch document {found.count} is missing: {reason}, and this tier stores nothing")
    if found.epoch is None and (found.count or (order.used and order.known is None)):
        # The document that is damaged or missing may have been that of an invalidation.
        walk = replace(walk, marks=(*walk.marks, order.mark))
    return _begin(walk, found)


def _begin(walk: Walk, found: CommonEpoch) -> Step:
    """Create the next document; if several processes do this at once, all get the same."""
    marks = tuple(dict.fromkeys((*found.invalidations, *walk.marks)))
    walk, (do, number, *_) = _do(walk, Do.BEGIN, found.count)
    return walk, Action(do, number, marks=marks, lacking=found.epoch is not None)


def _retry(walk: Walk) -> Step:
    if walk.attempts >= _ATTEMPTS:
        raise TemporaryStoreError("an epoch document was written, and is damaged or missing when it is read back")
    return _read(walk)


def _enough(walk: Walk, found: CommonEpoch) -> bool:
    return found.epoch is not None and found.covers(walk.marks)
