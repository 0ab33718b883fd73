"""Machines, media and an operator whose acts interleave at random, down to single requests of a task.

The tiers are real; a double of the I/O side runs their tasks one by one, in any order, and a report arrives any time
later. During each request for a document, another machine or the operator may act. A block tells how many new epochs
had begun when it was computed, and with which weights. No machine may use a block that is older than an epoch that it
knows of, or one of other weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tests.block_tier.fakes import FakeIo, FakeStore, make_context, make_namespace
from tests.block_tier.rig import CTX
from tests.epochs.common import find_common
from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_tier.epoch_chores import LOOK_SECONDS
from tiering.block_tier.tier import BlockTier
from tiering.epochs.documents import new_invalidation
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.errors import StoreError, TemporaryStoreError
from tiering.index.shared import SharedIndex
from tiering.index.slots import SlotIndex
from tiering.medium.block_store import Done, Place, StoreProbe, StoreTraits
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import TransferJob
from tiering.secondary.options import BlockTierOptions
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of

K = keys_of(*range(6))
SLOTS = 32
NAMESPACE = make_namespace()
START = "start"
"""The weights with which all machines start."""


class Block(NamedTuple):
    """A block's content."""

    key: OffloadKey
    """The key that the block was computed for."""
    computed: int
    """Number of new epochs that had begun when the block was computed."""
    weights: str
    """The weights that computed the block."""


class Medium(FakeStore):
    """A medium that outlives the machines, whose requests fail and are interrupted.

    Args:
        name: name of the medium.
        meanwhile: called during each request for a document.
        forgets: True for a medium that may lose all documents at once.
    """

    def __init__(self, name: str, meanwhile: Callable[[], None], *, forgets: bool = False) -> None:
        super().__init__()
        self.name = name
        self.up = True
        self.blocks: dict[Place, tuple[bytes, Block]] = {}
        """Block of each place, after the fingerprint of its namespace and epoch."""
        self.traits = StoreTraits(medium="FAKE", forgets=forgets)
        self._meanwhile = meanwhile

    def open(self) -> None:
        self._request()

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        self._request()
        return StoreProbe(tuple(place in self.blocks for place in places))

    def list_documents(self, prefix: str) -> list[str]:
        self._request()
        return super().list_documents(prefix)

    def read_document(self, name: str) -> bytes | None:
        self._request()
        found = self.documents.get(name)
        self._request()
        return found

    def write_document(self, name: str, data: bytes) -> None:
        self._request()
        self.documents[name] = data
        self._request()

    def remove_document(self, name: str) -> None:
        self._request()
        self.documents.pop(name, None)
        self._request()

    def create_document(self, name: str, data: bytes) -> bytes | None:
        self._request()
        found = self.documents.setdefault(name, data)
        self._request()
        return found

    def _request(self) -> None:
        self._meanwhile()
        if not self.up:
            raise TemporaryStoreError(f"{self.name} is down")

    def copied(self) -> tuple[dict[str, bytes], dict[Place, tuple[bytes, Block]]]:
        return copy.copy(self.documents), copy.copy(self.blocks)

    def restore(self, content: tuple[dict[str, bytes], dict[Place, tuple[bytes, Block]]]) -> None:
        self.documents, self.blocks = copy.copy(content[0]), copy.copy(content[1])


class DiskTier(BlockTier):
    """A tier of one machine that finds its blocks again at a start."""

    def on_opened(self, namespace: Namespace) -> None:
        disk, index = self.store, self.index
        assert isinstance(disk, Medium)
        assert isinstance(index, SlotIndex)
        own = {at: block.key for at, (found, block) in disk.blocks.items() if found == namespace.fingerprint}
        keys = {key: at for at, key in own.items()}
        free = [at for at in range(SLOTS) if at not in keys.values()]
        index.add_free(np.array(free, np.int64))
        slots = np.array(list(keys.values()), np.int64)
        index.merge(list(keys), slots, np.arange(1, len(slots) + 1, dtype=np.uint64))


class Machine:
    """One process: a disk and shared tiers below rows, driven as the manager drives them.

    Args:
        world: the world of the machine.
        number: number of the machine, which its disk keeps.
        clock: clock of the machine; clocks of different machines differ.
    """

    def __init__(self, world: World, number: int, clock: FakeClock) -> None:
        self.world, self.number, self.clock = world, number, clock
        self.agreement = EpochAgreement()
        self.weights = START
        self.rows: dict[OffloadKey, Block] = {}
        self.moved: dict[int, list[Block]] = {}
        """Blocks of each running job: stored or, once it has ended, loaded."""
        self.loads: dict[int, int] = {}
        """Running loads, and the number of times the rows had been emptied when each began."""
        self.emptied = 0
        self.resets = 0
        self.resetting: set[str] = set()
        """Tiers whose medium has not confirmed a reset."""
        self._jobs = 0
        own = [world.disks[number]] if number < len(world.disks) else []
        self.tiers = [self._tier(medium) for medium in [*own, *world.shared]]
        for tier in self.tiers:
            tier.open(clock())

    def _tier(self, medium: Medium) -> BlockTier:
        options = BlockTierOptions(type="fake")
        io = FakeIo(medium, self.clock, options.breaker)
        io.hold = True
        context = replace(make_context(self.clock, events=False), agreement=self.agreement, name=medium.name)
        if medium in self.world.shared:
            prefix: Callable[[Namespace], str] = lambda namespace: f"{namespace.fingerprint.hex()}/"  # noqa: E731
            return BlockTier(context, options, medium, SharedIndex(), place_prefix=prefix, io=io)
        return DiskTier(context, options, medium, SlotIndex(SLOTS), io=io)

    @property
    def known(self) -> int:
        """The last new epoch that the machine knows of."""
        return max((self.world.begun[mark] for mark in self.agreement.known if mark in self.world.begun), default=0)

    # ------------------------------------------------------------------------------------------------------ the manager

    def step(self) -> None:
        superseded = False
        for tier in self.tiers:
            for result in tier.get_finished():
                self._end(result.job_id, result.success)
        for tier in self.tiers:
            tier.on_schedule_end()
            if tier.name not in self.resetting:
                superseded |= tier.superseded()
            elif tier.on_schedule_end().reset_done:
                self.resetting.discard(tier.name)
        if superseded:
            self._empty()
            for tier in self.tiers:
                self._confirm(tier, tier.reset(self.clock(), follow=True))
                assert tier.name in self.resetting or not tier.superseded(), "it did not follow"

    def reset(self, revision: str | None) -> None:
        self.resets += 1
        self.weights = f"machine {self.number}, reset {self.resets}, {id(self)}" if revision is None else revision
        self._empty()
        for tier in reversed(self.tiers):
            self._confirm(tier, tier.reset(self.clock(), revision))

    def _confirm(self, tier: BlockTier, confirmed: bool) -> None:
        (self.resetting.discard if confirmed else self.resetting.add)(tier.name)

    def _empty(self) -> None:
        self.rows.clear()
        self.emptied += 1

    def use(self, keys: Sequence[OffloadKey]) -> None:
        """Use a prefix: from the rows, from a tier, or by computing it."""
        self.agreement.in_use = True
        for key in keys:
            if key in self.rows:
                self.check(self.rows[key])
            elif not self._load(key):
                self.rows[key] = Block(key, len(self.world.begun), self.weights)
                for tier in self.tiers:
                    self._store(tier, key)

    def _load(self, key: OffloadKey) -> bool:
        for tier in self.tiers:
            if tier.name not in self.resetting and tier.lookup_prefix([key], CTX).held:
                job = self._job(key, load=True)
                self.loads[job.job_id] = self.emptied
                tier.submit_load(job)
                return True
        return False

    def _store(self, tier: BlockTier, key: OffloadKey) -> None:
        if tier.name not in self.resetting:
            job = self._job(key)
            self.moved[job.job_id] = [self.rows[key]]
            tier.submit_store(job)

    def _job(self, key: OffloadKey, *, load: bool = False) -> TransferJob:
        self._jobs += 1
        return TransferJob(self._jobs, [key], np.arange(1), load, CTX, self.clock(), deadline=self.clock() + 30)

    def _end(self, job_id: int, success: bool) -> None:
        blocks = self.moved.pop(job_id, [])
        if self.loads.pop(job_id, None) == self.emptied and success:
            for block in blocks:
                self.check(block)
                self.rows.setdefault(block.key, block)
                for tier in self.tiers:
                    self._store(tier, block.key)

    def check(self, block: Block) -> None:
        self.world.checks += 1
        assert block.weights == self.weights, f"WRONG KV: {block} for {self.weights}"
        named = self.weights in REVISIONS
        assert named or block.computed >= self.known, f"WRONG KV: {block}, but machine {self.number} knows {self.known}"

    # --------------------------------------------------------------------------------------------------------- its I/O

    def work(self) -> None:
        """Run one task or one job of one tier; its report arrives with a later step."""
        pick = self.world.random
        tier = pick.choice(self.tiers)
        io, medium = tier.io, tier.store
        assert isinstance(io, FakeIo)
        assert isinstance(medium, Medium)
        if io.tasks and (not io.jobs or pick.random() < 0.7):
            task = io.tasks.pop(pick.randrange(len(io.tasks)))
            try:
                result, failure = task.run(), None
            except StoreError as error:
                result, failure = None, error
            # The machine may have taken reports meanwhile.
            io._done.append((task, result, failure))
        elif io.jobs:
            self._move(io, medium, pick.choice(io.jobs))

    def _move(self, io: FakeIo, medium: Medium, job: TransferJob) -> None:
        done = Done.ABSENT
        if not job.is_promotion and medium.up:
            medium.blocks[job.places[0]] = (job.fingerprint, self.moved[job.job_id][0])
            done = Done.DONE
        elif medium.up:
            found = medium.blocks.get(job.places[0])
            if found is not None and found[0] == job.fingerprint and found[1].key == job.moved[0]:
                self.moved[job.job_id] = [found[1]]
                done = Done.DONE
        io.finish(job.job_id, [done])


REVISIONS = ("step-1", "step-2")


class World:
    """Two machines with disks, two shared media, and an operator.

    Args:
        seed: seed of the walk.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.begun: dict[bytes, int] = {}
        """New epochs by their identifiers, counted from 1."""
        self.checks = 0
        self.log: list[str] = []
        self.shared = [Medium("bucket", self.meanwhile), Medium("pool", self.meanwhile, forgets=True)]
        self.disks = [Medium(f"disk-{number}", self.meanwhile) for number in range(2)]
        self.copies: dict[str, list[tuple[dict[str, bytes], dict[Place, tuple[bytes, Block]]]]] = {}
        self.machines: list[Machine | None] = [None, None]
        # Machines that were booted days apart.
        self.clocks = [FakeClock(self.random.uniform(0.0, 6e5)) for _ in self.machines]
        self._busy = False
        self._at_work: Machine | None = None

    def meanwhile(self) -> None:
        """Let something happen during a request."""
        if self._busy or self.random.random() > 0.08:
            return
        self._busy = True
        try:
            others = [machine for machine in self.running() if machine is not self._at_work]
            acts = [self.begin, self.lose, self.outage, *[machine.work for machine in others]]
            acts += [machine.step for machine in self.running()]
            self.random.choice(acts)()
        finally:
            self._busy = False

    def running(self) -> list[Machine]:
        return [machine for machine in self.machines if machine is not None]

    def act(self) -> None:
        acts = [self.use, self.step, self.work, self.wait, self.begin, self.lose, self.save, self.outage]
        acts += [self.reset, self.start, self.end]
        self.random.choices(acts, [14, 24, 44, 5, 2, 1.5, 1.5, 2, 0.7, 5, 2.5])[0]()

    def machine(self) -> Machine | None:
        return self.random.choice(self.machines)

    def use(self) -> None:
        if (machine := self.machine()) is not None:
            machine.use(K[: self.random.randint(1, len(K))])
            for key in self.random.sample(K, self.random.choice([1, 2, len(K)])):
                machine.rows.pop(key, None)

    def step(self) -> None:
        if (machine := self.machine()) is not None:
            machine.step()

    def work(self) -> None:
        if (machine := self.machine()) is not None:
            self._at_work = machine
            try:
                machine.work()
            finally:
                self._at_work = None

    def wait(self, seconds: float | None = None) -> None:
        chosen = seconds or self.random.choice([1.0, LOOK_SECONDS, LOOK_SECONDS, SURE_SECONDS + LOOK_SECONDS])
        for clock in self.clocks:
            clock.advance(chosen)

    def start(self) -> None:
        off = [number for number, machine in enumerate(self.machines) if machine is None]
        if off:
            number = self.random.choice(off)
            self.log.append(f"machine {number} starts")
            self.machines[number] = Machine(self, number, self.clocks[number])

    def end(self) -> None:
        """Kill a machine; its disk may return to an older copy before its next start."""
        on = [number for number, machine in enumerate(self.machines) if machine is not None]
        if not on or self._busy:
            return
        number = self.random.choice(on)
        self.machines[number] = None
        self.log.append(f"machine {number} is killed")
        disk = self.disks[number]
        self.copies.setdefault(disk.name, []).append(disk.copied())
        if self.random.random() < 0.4:
            self.log.append(f"{disk.name} returns to an older copy")
            disk.restore(self.random.choice(self.copies[disk.name]))

    def reset(self) -> None:
        if (machine := self.machine()) is not None:
            revision = self.random.choice([None, *REVISIONS])
            self.log.append(f"machine {machine.number} is reset to {revision}")
            machine.reset(revision)

    def begin(self) -> None:
        """Begin a new epoch on the media that are up; sometimes the command dies half-way."""
        mark = new_invalidation()
        self.begun[mark] = len(self.begun) + 1
        for medium in self.random.sample(self.shared, self.random.randint(1, 2)):
            self.log.append(f"epoch {self.begun[mark]} begins on {medium.name}")
            busy, self._busy = self._busy, True
            try:
                begin_common(medium, NAMESPACE, mark)
            except StoreError:
                self.log.append("which is down")
            finally:
                self._busy = busy

    def lose(self) -> None:
        medium = self.random.choice(self.shared)
        copies = self.copies.get(medium.name, [])
        if copies and self.random.random() < 0.5:
            self.log.append(f"{medium.name} returns to an older copy")
            medium.restore(self.random.choice(copies))
        elif self.random.random() < 0.5:
            self.log.append(f"{medium.name} is emptied")
            medium.restore(({}, {}))
        elif names := [name for name in medium.documents if name.startswith("epoch")]:
            name = self.random.choice(names)
            self.log.append(f"{medium.name} loses {name[-3:]}")
            del medium.documents[name]

    def save(self) -> None:
        medium = self.random.choice(self.shared)
        self.copies[medium.name] = [*self.copies.get(medium.name, [])[-2:], medium.copied()]

    def outage(self) -> None:
        medium = self.random.choice([*self.shared, *self.disks])
        medium.up = not medium.up
        self.log.append(f"{medium.name} goes {'up' if medium.up else 'down'}")

    def settle(self) -> None:
        """Let all trouble end, and check that the machines and the media agree in the end."""
        self._busy = True
        for medium in [*self.shared, *self.disks]:
            medium.up = True
        for _ in range(400):
            for machine in self.running():
                machine.step()
                for _ in range(12):
                    machine.work()
            self.wait(2.0)
        marks = [set(find_common(medium, NAMESPACE).invalidations) for medium in self.shared]
        for machine in self.running():
            for tier in machine.tiers:
                assert tier.get_stats().available, f"{tier.name} of machine {machine.number} is out of service"
            machine.use(K)
            if machine.resets == 0:
                assert [set(machine.agreement.known)] * 2 == marks, "a machine does not know of an epoch"


def walk(seed: int, steps: int) -> int:
    """Walk at random, and return the number of blocks that were checked."""
    world = World(seed)
    try:
        for _ in range(steps):
            world.act()
        world.settle()
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *world.log[-40:]]))
        raise
    return world.checks
