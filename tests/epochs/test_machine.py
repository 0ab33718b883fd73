"""All reachable states of two machines and an operator on a bucket, and of a disk, with faults.

The walks and verdicts are the real ones; what the I/O side, the manager and time do to them is modelled. A new epoch is
written as the set of invalidations that had begun when it was created: no block in it is older than these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import pytest

from tests.block_tier.fakes import make_namespace
from tiering.epochs.documents import EpochDocument
from tiering.epochs.machine import Result, judge, start, step
from tiering.epochs.state import Action, CommonEpoch, Do, EpochVerdict, Goal, Judged, Walk, WalkOrder
from tiering.errors import StoreError, TemporaryStoreError
from tiering.secondary.agreement import EpochAgreement, MetEpoch, medium_id

BASE = make_namespace().base
DAMAGED = b"damaged"
MEDIUM = "bucket"
Slot = EpochDocument | bytes | None
"""A document on the bucket: intact, damaged, or missing before others."""


@dataclass(frozen=True)
class Machine:
    """A process with one shared tier; off by default."""

    walk: Walk | None = None
    action: Action | None = None
    known: CommonEpoch | None = None
    """The documents that the process found last."""
    recent: bool = True
    """True if that was less than ``SURE_SECONDS`` ago."""
    losses: int = 0
    accepted: int = 0
    on: bool = False
    served: bool = False
    """True if the rows may hold blocks."""
    present: CommonEpoch | None = None
    """The common epoch that the tier serves."""
    successor: CommonEpoch | None = None
    marks: tuple[bytes, ...] = ()
    """Invalidations that the process knows."""
    met: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class World:
    """The bucket, the machines, the operator, and the truth about what has happened."""

    documents: tuple[Slot, ...] = ()
    machines: tuple[Machine, ...] = (Machine(), Machine())
    operator: Machine = Machine()
    """The command ``epoch new``; only its walk counts."""
    news: int = 1
    """New epochs that the operator may still begin."""
    faults: int = 0
    """Faults that may still happen."""
    fine: tuple[int, ...] = (0, 1, 2)
    """Actors whose every request is a step of its own; others stop only before they create documents."""
    used: bool = False
    begun: frozenset[bytes] = frozenset()
    """Invalidations that have begun."""
    ages: tuple[tuple[bytes, frozenset[bytes]], ...] = ()
    """Invalidations that had begun when each epoch was created."""

    def place(self, at: int, machine: Machine) -> World:
        if at == len(self.machines):
            return replace(self, operator=machine)
        return replace(self, machines=(*self.machines[:at], machine, *self.machines[at + 1 :]))

    def fault(self, **changes: object) -> World:
        return replace(self, faults=self.faults - 1, **changes)  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------------- the bucket

    def request(self, action: Action) -> tuple[World, Result]:
        """Do ``action`` on the bucket."""
        slot = self.documents[action.number] if action.number < len(self.documents) else None
        match action.do:
            case Do.READ | Do.CONFIRM:
                return self, slot
            case Do.LIST:
                return self, max((at for at, found in enumerate(self.documents) if found is not None), default=-1)
            case Do.PROVE:
                if slot != DAMAGED:
                    raise TemporaryStoreError("the medium has no damaged document")
                return self, None
        if slot is not None:
            return self, slot
        document, world = action.document, self
        if document is None:
            document = EpochDocument(BASE, b"%016d" % (len(self.ages) + 1), invalidations=action.marks)
            # Without a name of its own, an invalidation is the epoch of its document, unless that is the first.
            begun = self.begun.union(action.marks or ([document.epoch] if action.number else []))
            world = replace(self, begun=begun, ages=(*self.ages, (document.epoch, begun)))
        assert isinstance(document, EpochDocument)
        missing = (None,) * (action.number - len(self.documents))
        before, after = (*self.documents[: action.number], *missing), self.documents[action.number + 1 :]
        return replace(world, documents=(*before, document, *after)), document

    # ----------------------------------------------------------------------------------------------------- the machines

    def begin(self, at: int) -> World:
        """Begin a walk: an opening, a look, or a new epoch."""
        machine = self.operator if at == len(self.machines) else self.machines[at]
        if at == len(self.machines):
            order = WalkOrder(Goal.BEGIN, marks=(b"new %d" % self.news,), proof=False)
        else:
            mark = b"lost %d %d" % (at, len(self.ages))
            opening = machine.present is None
            order = WalkOrder(Goal.LOOK, known=machine.known, mark=mark, opening=opening, used=opening and self.used)
        walk, action = start(order)
        world = self if at < len(self.machines) else replace(self, news=self.news - 1)
        return world.place(at, replace(machine, on=True, walk=walk, action=action))

    def work(self, at: int, *answers: Result) -> World:
        """Do the next actions of a walk, and let its process act on the end of it."""
        world = self._work(at, *answers)
        while at not in self.fine and (walk := (*world.machines, world.operator)[at].walk) is not None:
            if walk.do in (Do.BEGIN, Do.RESTORE):
                break
            world = world._work(at)
        return world

    def _work(self, at: int, *answers: Result) -> World:
        machine = self.operator if at == len(self.machines) else self.machines[at]
        assert machine.walk is not None
        assert machine.action is not None
        try:
            world, result = self.request(machine.action)
            walk, action = step(machine.walk, *(answers or (result,)))
            if action.do is Do.JUDGE:
                walk, action = step(walk, Judged(not walk.lost or machine.recent, machine.marks))
        except StoreError:
            return self.place(at, replace(machine, walk=None, action=None))
        if action.do is not Do.DONE:
            return world.place(at, replace(machine, walk=walk, action=action))
        machine = replace(machine, walk=None, action=None)
        if at == len(self.machines):
            return world.place(at, machine)
        found = CommonEpoch(walk.documents)
        losses = machine.losses + (walk.lost and not walk.sure)
        machine = replace(machine, known=found, recent=True, losses=losses)
        found = replace(found, loss=losses if losses > machine.accepted else 0)
        return replace(world, used=True).place(at, reacted(machine, found, opened=walk.order.opening))

    def check(self) -> None:
        """No machine serves a block that is older than an invalidation that it knows."""
        ages = dict(self.ages)
        for machine in self.machines:
            if machine.present is not None:
                assert machine.present.epoch is not None
                assert ages[machine.present.epoch].issuperset(machine.marks), "WRONG KV"

    # ---------------------------------------------------------------------------------------------------- what may come

    def following(self) -> Iterator[World]:
        """Yield all worlds that one act leads to."""
        operator = len(self.machines)
        if self.operator.walk is not None:
            yield self.work(operator)
        elif self.news:
            yield self.begin(operator)
        for at, machine in enumerate(self.machines):
            if machine.walk is not None:
                yield self.work(at)
            else:
                yield self.begin(at)
            if machine.successor is not None:
                yield self.place(at, followed(machine))
        if self.faults:
            yield from self.failing()

    def failing(self) -> Iterator[World]:
        """Yield all worlds that one fault leads to."""
        yield from self.bad_paths()
        for at, machine in enumerate(self.machines):
            if machine.walk is not None and machine.action is not None and machine.action.do in (Do.BEGIN, Do.RESTORE):
                # The document is there, and the answer is lost.
                world, _ = self.request(machine.action)
                yield world.fault().place(at, replace(machine, walk=None, action=None))
            if machine.on:
                yield self.fault().place(at, Machine())  # a crash
            if machine.known is not None and machine.recent:
                yield self.fault().place(at, replace(machine, recent=False))  # an outage
        if self.operator.walk is not None:
            yield self.fault(operator=Machine())
        count = len(self.documents)
        for left in range(count):
            yield self.fault(documents=self.documents[:left])  # the bucket returns to an older copy
        if count and isinstance(self.documents[-1], EpochDocument):
            yield self.fault(documents=(*self.documents[:-1], DAMAGED))
        for lost in range(count - 1):
            yield self.fault(documents=(*self.documents[:lost], None, *self.documents[lost + 1 :]))

    def bad_paths(self) -> Iterator[World]:
        """Yield the worlds in which a request of one machine fails, or its answer is damaged or hidden."""
        for at, machine in enumerate(self.machines):
            if machine.walk is not None and machine.action is not None:
                yield self.fault().place(at, replace(machine, walk=None, action=None))
                if machine.action.do in (Do.BEGIN, Do.RESTORE) or (
                    machine.action.do in (Do.READ, Do.CONFIRM) and machine.action.number < len(self.documents)
                ):
                    yield self.fault().work(at, DAMAGED)
                    yield self.fault().work(at, None)


def reacted(machine: Machine, found: CommonEpoch, *, opened: bool) -> Machine:
    """Return the machine after the report of a walk (``TierLife._entered`` and ``_found``)."""
    if opened:
        if not found.covers(machine.marks):
            return machine
        if not agreement(machine).admits(MEDIUM, met(found)):
            return replace(machine, successor=found)
        return settled(machine, found)
    if machine.present is None or found.epoch is None:
        return machine
    verdict = judge(machine.present, found, machine.marks)
    if verdict is EpochVerdict.FOLLOW:
        return replace(machine, successor=found)
    if verdict is EpochVerdict.REOPEN:
        return replace(machine, present=None)
    if verdict is EpochVerdict.ENTER:
        return settled(machine, found)
    assert found.epoch == machine.present.epoch, "the tier goes on in an epoch that the bucket has left"
    return replace(machine, present=found)


def followed(machine: Machine) -> Machine:
    """Return the machine after the manager has dropped all older blocks (``TierLife.follow``)."""
    successor = machine.successor
    assert successor is not None
    return settled(replace(machine, successor=None), successor)


def settled(machine: Machine, found: CommonEpoch) -> Machine:
    """Return the machine in ``found``, or out of service if that lacks an invalidation."""
    accepted, found = max(machine.accepted, found.loss), replace(found, loss=0)
    agreed = agreement(machine)
    agreed.enter(MEDIUM, met(found))
    present = found if found.covers(agreed.known) else None
    # A look that began before has nothing to report to this epoch.
    walk, action = (machine.walk, machine.action) if machine.walk is None else (None, None)
    machine = replace(machine, walk=walk, action=action, accepted=accepted, met=True, served=True)
    return replace(machine, present=present, marks=agreed.known)


def met(found: CommonEpoch) -> MetEpoch:
    return MetEpoch(found.epoch or b"", found.invalidations, found.history, True, found.unexplained)


def agreement(machine: Machine) -> EpochAgreement:
    agreed = EpochAgreement()
    agreed.known = machine.marks
    agreed.met = {medium_id(MEDIUM): MetEpoch(b"")} if machine.met else {}
    agreed.in_use = machine.served
    return agreed


def explore(first: World, *, bad_paths_only: bool = False) -> set[World]:
    """Return all worlds that are reachable, after a check that each is safe."""
    seen, queue = {first}, deque([first])
    while queue:
        world = queue.popleft()
        world.check()
        for after in world.following() if not bad_paths_only else calm(world):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return seen


def calm(world: World) -> Iterator[World]:
    yield from (
        replace(world, faults=0).following()
        if not world.faults
        else (replace(after, faults=world.faults) for after in replace(world, faults=0).following())
    )
    if world.faults:
        yield from world.bad_paths()


def proceed(world: World) -> World:
    """Return the world after each machine that is not in its place has done one act, without faults."""
    if world.operator.walk is not None:
        return world.work(len(world.machines))
    for at, machine in enumerate(world.machines):
        if machine.walk is not None:
            return world.work(at)
        if machine.successor is not None:
            return world.place(at, followed(machine))
    for at, machine in enumerate(world.machines):
        if machine.present is None or not in_place(world, machine):
            return world.begin(at)
    return world


def in_place(world: World, machine: Machine) -> bool:
    """Return True if a look finds nothing that the machine has not found."""
    last = world.documents[-1] if world.documents else None
    known = machine.known or CommonEpoch()
    slots = tuple(None if isinstance(slot, bytes) else slot for slot in world.documents)
    # A look reads the last two documents and newer ones.
    if known.count != len(slots) or known.documents[-2:] != slots[-2:] or machine.present is None:
        return False
    return not isinstance(last, EpochDocument) or machine.present.epoch == last.epoch


def check_service(worlds: set[World]) -> None:
    """Without further faults, all machines come to serve, in one epoch unless its document is damaged."""
    fine: set[World] = set()
    for world in worlds:
        path = []
        at = world
        while at not in fine:
            path.append(at)
            assert len(path) < 300, f"stuck: {at}"
            after = proceed(at)
            if after is at:
                at.check()
                assert all(machine.present is not None for machine in at.machines)
                last = at.documents[-1]
                if isinstance(last, EpochDocument):
                    assert {machine.present.epoch for machine in at.machines if machine.present} == {last.epoch}
                    marks = CommonEpoch(tuple(None if isinstance(d, bytes) else d for d in at.documents)).invalidations
                    assert all(set(marks) <= set(machine.marks) for machine in at.machines)
                break
            at = after
        fine.update(path)


SHAPES = {
    "the requests of a machine": World(faults=1, fine=(0,), news=0),
    "the requests of a machine and a new epoch": World(fine=(0,)),
    "the requests of all and a new epoch": World(),
    "a fault and a new epoch": World(faults=1, fine=()),
}


def check_all(first: World) -> None:
    check_service(explore(first))


@pytest.mark.parametrize("first", SHAPES.values(), ids=SHAPES.keys())
def test_no_older_block_is_served_and_service_is_always_reached(first: World) -> None:
    check_all(first)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_holds_after_two_faults() -> None:
    check_all(World(faults=2, fine=()))


def test_an_epoch_that_a_second_attempt_begins_after_a_damaged_document_is_an_invalidation() -> None:
    walk, action = start(WalkOrder(Goal.LOOK, mark=b"lost", opening=True))
    results: list[tuple[Do, Result]] = [(Do.READ, None), (Do.LIST, -1), (Do.JUDGE, Judged(True, ()))]
    results += [(Do.BEGIN, DAMAGED), (Do.READ, DAMAGED), (Do.PROVE, None), (Do.READ, None), (Do.LIST, 0)]
    for do, result in results:
        assert action.do is do
        walk, action = step(walk, result)
    assert (action.do, action.number, action.marks) == (Do.BEGIN, 1, (b"lost",))


def test_a_bad_path_to_one_machine_ends_no_epoch_of_the_others() -> None:
    worlds = explore(World(faults=2, fine=()), bad_paths_only=True)
    assert max(len(world.ages) for world in worlds) == 2, "the first epoch and the operator's"


@dataclass(frozen=True)
class Disk:
    """A medium that only one tier writes, and the process on it."""

    document: Slot = None
    walk: Walk | None = None
    action: Action | None = None
    epoch: bytes | None = None
    """The epoch that the process serves."""
    owed: bool = False
    """True while a reset is not certain."""
    foreign: frozenset[bytes] = frozenset()
    """The epochs that were left by a certain reset."""
    count: int = 0
    """Number of epochs that were ever named."""
    faults: int = 2

    def begin(self, goal: Goal) -> Disk:
        walk, action = start(WalkOrder(goal))
        reset = goal is Goal.RESET
        return replace(self, walk=walk, action=action, owed=reset, epoch=None, count=self.count + 1)

    def work(self, *, fails: bool = False) -> Disk:
        assert self.walk is not None
        assert self.action is not None
        disk = self
        result: Result = self.document if self.action.do is Do.READ else None
        if fails:
            disk, result = replace(self, faults=self.faults - 1), TemporaryStoreError("no")
        elif self.action.do is Do.REMOVE:
            disk = replace(self, document=None)
        elif self.action.do is Do.WRITE:
            disk = replace(self, document=EpochDocument(BASE, b"%016d" % self.count))
        try:
            walk, action = step(self.walk, result)
        except StoreError:
            return replace(disk, walk=None, action=None)
        if action.do is not Do.DONE:
            return replace(disk, walk=walk, action=action)
        found = CommonEpoch(walk.documents).epoch or b"%016d" % self.count
        older = {b"%016d" % number for number in range(1, self.count)} if self.owed else set()
        foreign = self.foreign.union(older)
        return replace(disk, walk=None, action=None, owed=False, epoch=found, foreign=foreign)

    def following(self) -> Iterator[Disk]:
        if self.walk is not None:
            yield self.work()
        elif self.epoch is None:
            # A reset that failed is tried again; a later start reads the medium.
            yield self.begin(Goal.RESET if self.owed else Goal.OWN)
        elif self.count < 4:
            yield self.begin(Goal.RESET)
        if self.faults:
            crashed = replace(self, walk=None, action=None, epoch=None, owed=False, faults=self.faults - 1)
            yield crashed
            if self.action is not None and self.action.do is not Do.READ:
                yield self.work(fails=True)
            if isinstance(self.document, EpochDocument):
                yield replace(self, document=DAMAGED, faults=self.faults - 1)
                yield replace(self, document=None, faults=self.faults - 1)


def test_a_disk_serves_no_epoch_that_a_certain_reset_has_left() -> None:
    seen, queue = {Disk()}, deque([Disk()])
    while queue:
        disk = queue.popleft()
        assert disk.epoch is None or disk.epoch not in disk.foreign, f"WRONG KV: {disk}"
        for after in disk.following():
            if after not in seen:
                seen.add(after)
                queue.append(after)
    for disk in seen:
        for _ in range(10):
            if disk.walk is None and disk.epoch is not None:
                break
            disk = disk.work() if disk.walk is not None else disk.begin(Goal.RESET if disk.owed else Goal.OWN)
        assert disk.epoch is not None, "stuck"
        assert disk.epoch not in disk.foreign
    assert {Do.REMOVE, Do.WRITE, Do.READ} <= {disk.walk.do for disk in seen if disk.walk is not None}
