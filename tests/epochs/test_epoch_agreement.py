"""Common epochs that shared tiers find, compared with those in which other tiers' blocks were stored."""

from __future__ import annotations

import logging

import pytest

from tests.block_tier.fakes import FakeStore
from tests.block_tier.rig import CTX, K, Rig
from tests.epochs.common import ensure_common, find_common
from tiering.api.namespace import Namespace
from tiering.block_tier.epoch_chores import LOOK_SECONDS, RETRY_SECONDS
from tiering.epochs.documents import MAX_COMMON, EpochDocument, new_invalidation
from tiering.epochs.driver import begin_common
from tiering.epochs.state import CommonEpoch
from tiering.errors import TemporaryStoreError
from tiering.secondary.agreement import EpochAgreement, MetEpoch, medium_id
from tiering.secondary.contract import PrefixAnswer


class Machine:
    """A disk and some shared media; engines start on the machine one after the other.

    Args:
        media: the shared media, by the names of their tiers.
    """

    def __init__(self, **media: FakeStore) -> None:
        self.disk = FakeStore()
        self.media = media

    def start(self, *, used: bool = False) -> Engine:
        return Engine(self, used)


class Engine:
    """The tiers of one engine: a disk, and a shared tier per medium. None is open yet."""

    def __init__(self, machine: Machine, used: bool) -> None:
        agreement = EpochAgreement()
        agreement.in_use = used
        self.agreement = agreement
        self.disk = Rig(store=machine.disk, agreement=agreement, name="disk")
        self.shared = {
            name: Rig(store=store, shared=True, agreement=agreement, name=name) for name, store in machine.media.items()
        }

    def open(self, *rigs: Rig) -> Engine:
        """Open tiers in this order; default: the disk first, then the shared tiers."""
        for rig in rigs or (self.disk, *self.shared.values()):
            rig.tier.open(rig.clock() + 1)
        return self

    def superseded(self) -> list[str]:
        """Return the names of the shared tiers that wait for the older blocks to be dropped."""
        return [name for name, rig in self.shared.items() if rig.tier.superseded()]

    def follow(self) -> None:
        for rig in (self.disk, *self.shared.values()):
            rig.tier.reset(rig.clock() + 1, follow=True)

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and run the tasks that are due."""
        for rig in (self.disk, *self.shared.values()):
            rig.clock.advance(seconds)
            rig.finished()
            rig.io.run_tasks()
            rig.finished()

    def end(self) -> None:
        """End the engine as a crash would, after a step."""
        self.step()


def document_of(machine: Machine, rig: Rig) -> EpochDocument:
    document = EpochDocument.parse(machine.disk.documents[rig.document])
    assert document is not None
    return document


def begin(store: FakeStore, namespace: Namespace) -> None:
    begin_common(store, namespace)


def serving(rig: Rig) -> int:
    return rig.tier.get_stats().available


@pytest.fixture
def bucket() -> FakeStore:
    return FakeStore()


def with_blocks(machine: Machine) -> Engine:
    """Run an engine that stores blocks on the disk, and let it end."""
    engine = machine.start().open()
    engine.disk.store_blocks(K[:4])
    engine.end()
    return engine


class TestAtTheStart:
    @pytest.mark.parametrize("disk_first", [True, False])
    def test_a_disk_with_blocks_of_an_older_epoch_never_serves_beside_the_new_one(
        self, bucket: FakeStore, disk_first: bool
    ) -> None:
        machine = Machine(bucket=bucket)
        old = with_blocks(machine).disk.epoch
        engine = machine.start()
        begin(bucket, engine.disk.context.namespace)
        rigs = [engine.disk, engine.shared["bucket"]]
        engine.open(*(rigs if disk_first else reversed(rigs)))
        if disk_first:
            assert (engine.superseded(), serving(engine.shared["bucket"])) == (["bucket"], 0)
            engine.follow()
        assert (engine.superseded(), [serving(rig) for rig in rigs]) == ([], [1, 1])
        assert engine.disk.epoch != old
        assert not document_of(machine, engine.disk).private

    def test_a_tier_that_waits_drops_stores_and_answers_lookups_with_no(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        with_blocks(machine)
        engine = machine.start()
        begin(bucket, engine.disk.context.namespace)
        engine.open()
        shared = engine.shared["bucket"]
        shared.submit_store(K[:2])
        (result,) = shared.finished()
        assert (result.success, shared.tier.lookup_prefix(K[:2], CTX)) == (False, PrefixAnswer(0, False))
        assert not shared.tier.on_schedule_end().wanted

    def test_a_reset_before_the_blocks_are_dropped_wins(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        with_blocks(machine)
        engine = machine.start()
        begin(bucket, engine.disk.context.namespace)
        engine.open()
        shared = engine.shared["bucket"]
        assert shared.tier.reset(shared.clock())
        assert (engine.superseded(), serving(shared)) == ([], 1)
        assert shared.epoch not in {found.epoch for found in engine.agreement.met.values()}

    def test_the_same_epoch_under_another_name_of_the_tier_is_recognised(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start()
        for _ in range(2):
            begin(bucket, engine.disk.context.namespace)
        old = with_blocks(machine).disk.epoch
        machine.media = {"renamed": bucket}
        engine = machine.start(used=True).open()
        assert (engine.superseded(), engine.disk.epoch) == ([], old)

    def test_a_disk_of_an_earlier_version_is_kept_only_if_no_epoch_has_begun(self, bucket: FakeStore) -> None:
        for moved in (False, True):
            machine = Machine(bucket=FakeStore())
            engine = with_blocks(machine)
            document = document_of(machine, engine.disk)
            assert document.common
            namespace = engine.disk.context.namespace
            machine.disk.documents[engine.disk.document] = EpochDocument.of(
                namespace.with_epoch(document.epoch), None, private=False
            ).pack()
            if moved:
                begin(machine.media["bucket"], namespace)
            assert machine.start().open().superseded() == (["bucket"] if moved else [])

    def test_a_bucket_that_lost_its_documents_counts_as_moved(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        with_blocks(machine)
        bucket.documents.clear()
        assert machine.start().open().superseded() == ["bucket"]


class TestSeveralSharedTiers:
    def test_one_new_epoch_drops_the_disk_and_begins_on_the_other_medium_too(self) -> None:
        machine = Machine(first=FakeStore(), second=FakeStore())
        with_blocks(machine)
        engine = machine.start()
        namespace = engine.disk.context.namespace
        begin(machine.media["second"], namespace)
        engine.open()
        assert engine.superseded() == ["second"]
        old = engine.shared["first"].epoch
        engine.follow()
        assert [serving(rig) for rig in engine.shared.values()] == [0, 1]
        engine.step()
        assert [serving(rig) for rig in engine.shared.values()] == [1, 1]
        assert engine.shared["first"].epoch != old
        marks = {find_common(store, namespace).invalidations for store in machine.media.values()}
        assert len(marks) == 1

    def test_a_medium_that_opens_after_another_ones_epoch_began_begins_it_too(self) -> None:
        machine = Machine(first=FakeStore(), second=FakeStore())
        old = with_blocks(machine).shared["first"].epoch
        engine = machine.start()
        begin(machine.media["second"], engine.disk.context.namespace)
        engine.open(engine.disk, engine.shared["second"])
        engine.follow()
        engine.open(engine.shared["first"])
        assert (engine.superseded(), serving(engine.shared["first"])) == ([], 1)
        assert engine.shared["first"].epoch != old

    @pytest.mark.parametrize("used", [False, True])
    def test_rows_and_a_medium_without_the_epoch_never_meet_the_other_medium(self, used: bool) -> None:
        machine = Machine(first=FakeStore(), second=FakeStore())
        engine = machine.start(used=used)
        first, second = engine.shared.values()
        begin(machine.media["second"], engine.disk.context.namespace)
        engine.open(engine.disk, first)
        old = first.epoch
        engine.open(second)
        # With rows in use, blocks of the first medium may be in them.
        assert (engine.superseded(), serving(second)) == ((["second"], 0) if used else ([], 1))
        assert serving(first) == (1 if used else 0)
        if used:
            engine.follow()
            assert (serving(first), serving(second)) == (0, 1)
        engine.step()
        assert (serving(first), serving(second), first.epoch != old) == (1, 1, True)

    def test_two_new_epochs_that_cross_end_in_media_that_have_both(self) -> None:
        machine = Machine(first=FakeStore(), second=FakeStore())
        engine = machine.start(used=True).open()
        namespace = engine.disk.context.namespace
        marks = [new_invalidation(), new_invalidation()]
        for mark, store in zip(marks, machine.media.values(), strict=True):
            begin_common(store, namespace, mark)
        engine.step(LOOK_SECONDS)
        assert engine.superseded() == ["first", "second"]
        engine.follow()
        assert engine.superseded() == []
        engine.step()
        engine.step()
        assert [serving(rig) for rig in engine.shared.values()] == [1, 1]
        for store, rig in zip(machine.media.values(), engine.shared.values(), strict=True):
            found = find_common(store, namespace)
            assert (set(found.invalidations), found.epoch) == (set(marks), rig.epoch)

    def test_an_epoch_that_came_with_another_medium_does_not_drop_the_disk_twice(self) -> None:
        machine = Machine(first=FakeStore(), second=FakeStore())
        engine = with_blocks(machine)
        namespace, mark = engine.disk.context.namespace, new_invalidation()
        begin_common(machine.media["first"], namespace, mark)
        engine.step(LOOK_SECONDS)
        assert engine.superseded() == ["first"]
        begin_common(machine.media["second"], namespace, mark)
        engine.follow()
        engine.step()
        engine.disk.store_blocks(K[:2])
        epoch = engine.disk.epoch
        engine.step(LOOK_SECONDS)
        assert (engine.superseded(), engine.disk.epoch) == ([], epoch)
        engine.end()
        later = machine.start().open()
        assert (later.superseded(), later.disk.epoch) == ([], epoch)

    def test_a_medium_that_was_down_at_the_drop_is_compared_with_what_was_known_of_it(self) -> None:
        for moved in (False, True):
            machine = Machine(first=FakeStore(), second=FakeStore())
            first, second = machine.media.values()
            namespace = machine.start().disk.context.namespace
            for store in (first, second):
                begin(store, namespace)
                begin(store, namespace)
            with_blocks(machine)
            engine = machine.start(used=True)
            begin(second, namespace)
            engine.open(engine.disk, engine.shared["second"])
            engine.follow()
            engine.disk.store_blocks(K[:2])
            engine.step(10.0)
            if moved:
                begin(first, namespace)
            engine.open(engine.shared["first"])
            assert engine.superseded() == (["first"] if moved else [])

    def test_a_medium_added_later_drops_blocks_only_if_its_epoch_has_moved(self) -> None:
        for moved in (False, True):
            machine = Machine(first=FakeStore())
            engine = with_blocks(machine)
            machine.media["second"] = FakeStore()
            ensure_common(machine.media["second"], engine.disk.context.namespace, ())
            if moved:
                begin(machine.media["second"], engine.disk.context.namespace)
            assert machine.start().open().superseded() == (["second"] if moved else [])


class TestLate:
    """The medium is reached after the engine has begun to work."""

    @pytest.mark.parametrize("recorded", [True, False])
    def test_an_epoch_that_the_disk_has_recorded_vouches_for_the_rows_too(
        self, bucket: FakeStore, recorded: bool
    ) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start(used=True)
        for _ in range(2):
            begin(bucket, engine.disk.context.namespace)
        if recorded:
            with_blocks(machine)
        engine.open(engine.disk)
        engine.open(engine.shared["bucket"])
        assert engine.superseded() == ([] if recorded else ["bucket"])

    def test_a_store_that_runs_makes_a_fresh_disk_older_than_a_moved_epoch(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start()
        for _ in range(2):
            begin(bucket, engine.disk.context.namespace)
        engine.open(engine.disk)
        engine.disk.submit_store(K[:2])
        engine.open(engine.shared["bucket"])
        assert engine.superseded() == ["bucket"]

    def test_an_epoch_that_begins_in_the_running_engine_is_recorded_for_the_next_start(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = with_blocks(machine)
        begin(bucket, engine.disk.context.namespace)
        engine.step(LOOK_SECONDS)
        assert engine.superseded() == ["bucket"]
        engine.follow()
        engine.disk.store_blocks(K[:2])
        engine.end()
        epoch, later = engine.disk.epoch, machine.start().open()
        assert (later.superseded(), later.disk.epoch) == ([], epoch), "the blocks of the new epoch are kept"

    def test_after_a_reset_the_blocks_stay_those_of_the_process(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = with_blocks(machine)
        engine.disk.tier.reset(engine.disk.clock() + 1)
        begin(bucket, engine.disk.context.namespace)
        engine.step(LOOK_SECONDS)
        engine.follow()
        assert document_of(machine, engine.disk).private

    def test_a_reset_while_the_disk_follows_makes_its_epoch_private(self, bucket: FakeStore) -> None:
        engine = with_blocks(Machine(bucket=bucket))
        engine.disk.io.hold = True
        assert not engine.disk.tier.reset(engine.disk.clock(), follow=True)
        assert not engine.disk.tier.reset(engine.disk.clock())
        engine.step()
        engine.step()
        document = EpochDocument.parse(engine.disk.store.documents[engine.disk.document])
        assert document is not None
        assert (document.private, document.epoch) == (True, engine.disk.epoch)


class TestOlderCopies:
    """Media return to a copy from before a new epoch."""

    def moved(self, **media: FakeStore) -> tuple[Machine, Engine, dict[str, dict[str, bytes]]]:
        """Return a machine whose engine has followed a new epoch of all media, and the documents from before."""
        machine = Machine(**media)
        engine = with_blocks(machine)
        copies = {name: dict(store.documents) for name, store in machine.media.items()}
        copies["disk"] = dict(machine.disk.documents)
        mark = new_invalidation()
        for store in machine.media.values():
            begin_common(store, engine.disk.context.namespace, mark)
        engine.step(LOOK_SECONDS)
        engine.follow()
        engine.step()
        engine.disk.store_blocks(K[:4])
        engine.end()
        return machine, engine, copies

    def test_a_disk_remembers_the_epoch_that_its_bucket_has_lost(self, bucket: FakeStore) -> None:
        machine, _, copies = self.moved(bucket=bucket)
        old = common(machine, copies["bucket"]).epoch
        bucket.documents = dict(copies["bucket"])
        later = machine.start().open()
        assert later.superseded() == ["bucket"], "the bucket may have lost a still newer epoch as well"
        later.follow()
        assert (serving(later.shared["bucket"]), later.shared["bucket"].epoch != old) == (1, True)
        assert find_common(bucket, later.disk.context.namespace).invalidations == later.agreement.known != ()

    def test_an_engine_that_runs_takes_its_bucket_forward_again(self, bucket: FakeStore) -> None:
        machine, engine, copies = self.moved(bucket=bucket)
        epoch = engine.shared["bucket"].epoch
        bucket.documents = dict(copies["bucket"])
        engine.step(LOOK_SECONDS)
        assert (engine.superseded(), engine.shared["bucket"].epoch) == ([], epoch)
        assert machine.start().open().shared["bucket"].epoch == epoch

    def test_one_of_two_media_takes_the_other_forward(self) -> None:
        machine, engine, copies = self.moved(first=FakeStore(), second=FakeStore())
        old = common(machine, copies["first"]).epoch
        machine.media["first"].documents = dict(copies["first"])
        machine.disk = FakeStore()
        later = machine.start().open()
        later.step()
        assert [serving(rig) for rig in later.shared.values()] == [1, 1]
        assert later.shared["first"].epoch not in {old, engine.shared["first"].epoch}

    def test_a_disk_of_before_is_emptied(self, bucket: FakeStore) -> None:
        machine, _, copies = self.moved(bucket=bucket)
        machine.disk.documents = dict(copies["disk"])
        assert machine.start().open().superseded() == ["bucket"]

    def test_a_second_disk_of_before_is_emptied_without_any_bucket(self, bucket: FakeStore) -> None:
        machine, _, copies = self.moved(bucket=bucket)
        machine.media = {}
        for first in (True, False):
            engine = machine.start()
            store = FakeStore()
            store.documents = dict(copies["disk"])
            other = Rig(store=store, agreement=engine.agreement, name="other")
            old = EpochDocument.parse(store.documents[other.document])
            assert old is not None
            engine.open(*([engine.disk, other] if first else [other, engine.disk]))
            other.finished()
            other.io.run_tasks()
            other.finished()
            assert (serving(other), other.epoch != old.epoch) == (1, True)

    def test_a_disk_that_comes_late_with_an_epoch_drops_the_rows(self, bucket: FakeStore) -> None:
        machine, _, copies = self.moved(bucket=bucket)
        bucket.documents = dict(copies["bucket"])
        engine = machine.start(used=True)
        engine.open(engine.shared["bucket"])
        old = engine.shared["bucket"].epoch
        assert old == common(machine, copies["bucket"]).epoch
        engine.open(engine.disk)
        assert (engine.superseded(), serving(engine.shared["bucket"])) == (["bucket"], 0)
        engine.follow()
        engine.step()
        assert (serving(engine.shared["bucket"]), engine.shared["bucket"].epoch != old) == (1, True)


def common(machine: Machine, documents: dict[str, bytes]) -> CommonEpoch:
    """Return the common epoch in a medium's documents."""
    store = FakeStore()
    store.documents = documents
    return find_common(store, machine.start().disk.context.namespace)


class TestTheRecord:
    def test_is_written_again_after_a_failure_which_is_told_once(
        self, bucket: FakeStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start().open()
        machine.disk.failure = TemporaryStoreError("no")
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                engine.step(2 * RETRY_SECONDS)
        assert caplog.text.count("could not be recorded") == 1
        machine.disk.failure = None
        engine.step(2 * RETRY_SECONDS)
        (found,) = document_of(machine, engine.disk).common
        assert found == (medium_id("bucket"), engine.shared["bucket"].epoch)

    def test_does_not_bring_the_epoch_before_a_reset_back(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start().open()
        old = engine.disk.epoch
        engine.disk.finished()
        assert [task.name for task in engine.disk.io.tasks] == ["record"]
        late, engine.disk.io.tasks = engine.disk.io.tasks, []
        engine.disk.tier.reset(engine.disk.clock() + 1)
        for task in late:
            task.run()
        assert document_of(machine, engine.disk).epoch == engine.disk.epoch != old

    def test_that_comes_late_says_nothing_of_another_disk_in_its_place(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        engine = machine.start().open()
        namespace = engine.disk.context.namespace.next_epoch()
        engine.disk.finished()
        late, engine.disk.io.tasks = engine.disk.io.tasks, []
        assert [task.name for task in late] == ["record"]
        engine.disk.tier.leave_medium()
        other = EpochDocument.of(namespace, None, private=False).pack()
        machine.disk.documents[engine.disk.document] = other
        engine.disk.tier.enter_medium()
        engine.disk.io.run_tasks()
        for task in late:
            task.run()
        assert machine.disk.documents[engine.disk.document] == other

    def test_of_a_stack_without_shared_tiers_leaves_the_document_as_it_was(self) -> None:
        machine = Machine()
        engine = with_blocks(machine)
        namespace = engine.disk.context.namespace.with_epoch(engine.disk.epoch)
        expected = EpochDocument.of(namespace, None, private=False).pack()
        assert machine.disk.documents[engine.disk.document] == expected
        assert len(expected) == 80

    def test_of_a_tier_that_stores_nothing_is_not_written(self, bucket: FakeStore) -> None:
        machine = Machine(bucket=bucket)
        with_blocks(machine)
        before = dict(machine.disk.documents)
        machine.media = {"other": FakeStore()}
        engine = machine.start()
        engine.disk = Rig(store=machine.disk, agreement=engine.agreement, name="disk", admission="none")
        engine.open().step()
        assert machine.disk.documents == before


def test_a_document_with_common_epochs_comes_back_whole_or_not_at_all() -> None:
    namespace = Namespace("{}").next_epoch()
    common = {bytes([number] * 16): bytes([number + 100] * 16) for number in range(3)}
    document = EpochDocument.of(namespace, "weights 7", private=False, common=common)
    packed = document.pack()
    found = EpochDocument.parse(packed)
    assert (found, dict(document.common)) == (document, common)
    for at in range(len(packed)):
        assert EpochDocument.parse(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]) is None
        assert EpochDocument.parse(packed[:at]) is None
    assert EpochDocument.parse(packed + bytes(32)) is None


def test_the_last_common_epochs_are_kept() -> None:
    common = {number.to_bytes(16, "big"): bytes(16) for number in range(MAX_COMMON + 3)}
    document = EpochDocument.of(Namespace("{}").next_epoch(), None, private=False, common=common)
    assert document.common == tuple(common.items())[3:]
    assert EpochDocument.parse(document.pack()) == document


def test_an_epoch_that_was_met_is_not_compared_again_and_a_later_invalidation_is_refused() -> None:
    agreement = EpochAgreement()
    met = MetEpoch(b"1" * 16, (b"a" * 16,))
    for _ in range(2):
        assert agreement.admits("bucket", met)
        agreement.enter("bucket", met)
    assert agreement.admits("bucket", MetEpoch(b"2" * 16, met.invalidations)), "it was begun anew, and nothing is older"
    assert not agreement.admits("bucket", MetEpoch(b"3" * 16, (*met.invalidations, b"b" * 16)))
    assert not agreement.admits("bucket", MetEpoch(b"2" * 16, met.invalidations, unexplained=True))
