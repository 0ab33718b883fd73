"""A tier that notices a new common epoch stays where it is until the manager lets it follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.block_tier.rig import CTX, K, Rig
from tests.epochs.common import ensure_common, find_common
from tiering.block_tier.epoch_chores import LOOK_SECONDS
from tiering.epochs.documents import epoch_document, new_invalidation
from tiering.epochs.driver import SURE_SECONDS, CommonHistory, begin_common
from tiering.errors import TemporaryStoreError
from tiering.secondary.agreement import EpochAgreement, MetEpoch
from tiering.secondary.contract import PrefixAnswer
from tiering.testing.clock import FakeClock


def begin(rig: Rig) -> bytes:
    """Begin a new common epoch on the rig's medium, as another process does, and return it."""
    epoch = begin_common(rig.store, rig.context.namespace).epoch
    assert epoch is not None
    return epoch


def look(rig: Rig, seconds: float = LOOK_SECONDS) -> None:
    """Let time pass, and let the looks that are due end."""
    rig.clock.advance(seconds)
    rig.finished()
    rig.io.run_tasks()
    rig.finished()


def available(rig: Rig) -> tuple[int, int]:
    stats = rig.tier.get_stats()
    return stats.available, stats.writable


def test_a_tier_stays_in_its_epoch_until_it_is_to_follow_and_then_enters_the_new_one() -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:2])
    old, new = rig.epoch, begin(rig)
    assert not rig.tier.superseded()
    look(rig)
    assert (rig.tier.superseded(), rig.epoch) == (True, old)
    begun = rig.clock()
    assert rig.tier.reset(begun, follow=True)
    assert (rig.tier.superseded(), rig.epoch, rig.clock()) == (False, new, begun)
    assert available(rig) == (1, 1)
    assert rig.tier.get_stats().private_epoch == 0
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, True)


def test_a_job_in_flight_does_not_count_in_the_new_epoch() -> None:
    rig = Rig(shared=True).opened()
    job = rig.submit_store(K[:2])
    begin(rig)
    look(rig)
    rig.tier.reset(rig.clock(), follow=True)
    rig.io.finish(job)
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, [])


def test_the_last_of_several_new_epochs_is_entered() -> None:
    rig = Rig(shared=True).opened()
    begin(rig)
    look(rig)
    last = begin(rig)
    look(rig)
    rig.tier.reset(rig.clock(), follow=True)
    assert rig.epoch == last


@pytest.mark.parametrize("revision", [None, "step-1"])
def test_a_reset_before_it_could_follow_wins(revision: str | None) -> None:
    rig = Rig(shared=True).opened()
    new = begin(rig)
    look(rig)
    rig.tier.reset(rig.clock(), revision)
    own = rig.epoch
    assert (rig.tier.superseded(), own != new) == (False, True)
    rig.tier.reset(rig.clock(), follow=True)
    assert (rig.epoch, available(rig)) == (own, (1, 1))


def test_a_tier_that_opens_again_does_not_enter_the_successor_that_it_found_before() -> None:
    agreement = EpochAgreement()
    rig = Rig(shared=True, agreement=agreement).opened()
    begin(rig)
    look(rig)
    assert rig.tier.superseded()
    # Another tier has found the same new epoch, and the manager holds no blocks: this tier opens its medium again.
    agreement.learn(find_common(rig.store, rig.context.namespace).invalidations)
    last = begin(rig)
    for _ in range(3):
        rig.tier.reset(rig.clock(), follow=True)
        assert rig.tier.namespace is None or rig.epoch == last
        rig.io.run_tasks()
        rig.finished()
    assert rig.epoch == last
    newer = begin(rig)
    look(rig)
    assert rig.tier.superseded(), "a tier in a common epoch looks for newer ones"
    rig.tier.reset(rig.clock(), follow=True)
    assert rig.epoch == newer


def test_after_the_shutdown_there_is_nothing_to_follow() -> None:
    rig = Rig(shared=True).opened()
    begin(rig)
    look(rig)
    rig.tier.shutdown(rig.clock() + 1)
    assert not rig.tier.superseded()


def test_a_medium_of_its_own_is_reset_without_a_wait() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.io.hold = True
    begun = rig.clock()
    assert not rig.tier.reset(begun, follow=True)
    assert (rig.clock(), available(rig)) == (begun, (0, 0))
    rig.io.run_tasks()
    rig.finished()
    assert (rig.tier.on_schedule_end().reset_done, available(rig)) == (True, (1, 1))
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, False)


class TestAnotherSharedTier:
    """One shared tier of the stack has a new common epoch; the medium of this one lacks it."""

    @pytest.fixture
    def rig(self) -> Rig:
        rig = Rig(shared=True, agreement=EpochAgreement()).opened()
        rig.store_blocks(K[:2])
        return rig

    def learn(self, rig: Rig, *, dropped: bool = True) -> bytes:
        mark = new_invalidation()
        rig.context.agreement.learn([mark], dropped=dropped)
        return mark

    def test_begins_the_epoch_on_its_medium_before_it_is_used_again(self, rig: Rig) -> None:
        old, mark = rig.epoch, self.learn(rig)
        assert available(rig) == (0, 0)
        assert not rig.tier.superseded()
        look(rig, 0.0)
        assert (available(rig), rig.epoch != old) == ((1, 1), True)
        assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, True)
        assert find_common(rig.store, rig.context.namespace).invalidations == (mark,)

    def test_enters_the_epoch_that_the_operator_has_begun_meanwhile(self, rig: Rig) -> None:
        mark = self.learn(rig)
        begun = begin_common(rig.store, rig.context.namespace, mark)
        look(rig, 0.0)
        assert (rig.epoch, available(rig)) == (begun.epoch, (1, 1))

    def test_is_not_used_while_its_medium_does_not_answer(self, rig: Rig) -> None:
        rig.store.failure = TemporaryStoreError("no")
        self.learn(rig)
        for _ in range(3):
            look(rig)
            assert available(rig) == (0, 0)
        rig.store.failure = None
        look(rig)
        look(rig)
        assert available(rig) == (1, 1)

    def test_is_not_used_before_the_rows_are_empty(self, rig: Rig) -> None:
        rig.context.agreement.in_use = True
        old = rig.epoch
        self.learn(rig, dropped=False)
        assert (rig.tier.superseded(), available(rig), rig.epoch) == (True, (0, 0), old)
        assert rig.tier.reset(rig.clock(), follow=True)
        look(rig, 0.0)
        assert (rig.tier.superseded(), available(rig), rig.epoch != old) == (False, (1, 1), True)

    def test_that_stores_nothing_waits_for_an_engine_that_begins_the_epoch(self) -> None:
        store = Rig(shared=True).opened().store
        reader = Rig(shared=True, store=store, agreement=EpochAgreement(), admission="none").opened()
        mark = self.learn(reader)
        for _ in range(3):
            look(reader)
            assert available(reader) == (0, 0)
        begun = begin_common(store, reader.context.namespace, mark)
        look(reader, 10 * LOOK_SECONDS)
        look(reader, 0.0)
        assert (reader.epoch, available(reader)[0]) == (begun.epoch, 1)

    def test_learns_while_it_opens_and_opens_again(self) -> None:
        rig = Rig(shared=True, agreement=EpochAgreement())
        rig.tier.open(rig.clock())
        rig.io.run_tasks()
        mark = self.learn(rig)
        rig.finished()
        assert available(rig) == (0, 0)
        look(rig, 0.0)
        assert available(rig) == (1, 1)
        assert find_common(rig.store, rig.context.namespace).invalidations == (mark,)

    def test_in_an_epoch_of_its_own_goes_on(self, rig: Rig) -> None:
        rig.tier.reset(rig.clock())
        own = rig.epoch
        self.learn(rig)
        assert (rig.epoch, available(rig)) == (own, (1, 1))


class TestLostDocuments:
    """The medium loses the documents of its common epoch, or returns to older ones."""

    @pytest.fixture
    def rig(self) -> Rig:
        rig = Rig(shared=True, agreement=EpochAgreement()).opened()
        begin(rig)
        look(rig)
        rig.tier.reset(rig.clock(), follow=True)
        rig.store_blocks(K[:2])
        return rig

    @pytest.mark.parametrize("left", [0, 1], ids=["all", "the last one"])
    def test_are_written_again_if_they_were_seen_a_moment_ago(self, rig: Rig, left: int) -> None:
        before = {name: data for name, data in rig.store.documents.items() if name.startswith(("epoch", "namespace"))}
        for name in list(before)[left:]:
            del rig.store.documents[name]
        look(rig)
        assert (rig.tier.superseded(), available(rig)) == (False, (1, 1))
        assert before.items() <= rig.store.documents.items()
        assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(2, False)

    def lose_unseen(self, rig: Rig) -> None:
        rig.store.failure = TemporaryStoreError("unreachable")
        look(rig)
        look(rig, SURE_SECONDS)
        rig.store.failure = None
        rig.store.documents.clear()
        look(rig)

    def test_count_as_a_new_epoch_after_a_time_in_which_nothing_was_seen(self, rig: Rig) -> None:
        old = rig.epoch
        known = rig.context.agreement.known
        self.lose_unseen(rig)
        assert rig.tier.superseded(), "an epoch that began meanwhile may be lost too"
        rig.tier.reset(rig.clock(), follow=True)
        look(rig, 0.0)
        assert (rig.tier.superseded(), available(rig), rig.epoch != old) == (False, (1, 1), True)
        assert find_common(rig.store, rig.context.namespace).invalidations == known, "what is known is written again"
        look(rig)
        assert not rig.tier.superseded(), "the blocks are dropped once"

    def test_cost_nothing_if_a_bucket_vouches(self, rig: Rig) -> None:
        met = MetEpoch(b"b" * 16, rig.context.agreement.known, durable=True)
        rig.context.agreement.enter("bucket", met)
        self.lose_unseen(rig)
        assert (rig.tier.superseded(), available(rig)) == (False, (1, 1))
        assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(2, False)

    def test_an_epoch_begun_by_another_engine_after_the_loss_is_entered_without_dropping(self, rig: Rig) -> None:
        known = rig.context.agreement.known
        rig.store.documents.clear()
        other = ensure_common(rig.store, rig.context.namespace, known)
        look(rig)
        assert (rig.tier.superseded(), rig.epoch, available(rig)) == (False, other.epoch, (1, 1))

    def test_an_engine_that_knows_less_does_not_take_the_others_back(self, rig: Rig) -> None:
        rig.store.documents.clear()
        late = ensure_common(rig.store, rig.context.namespace, ())
        look(rig)
        assert rig.epoch != late.epoch
        assert find_common(rig.store, rig.context.namespace).covers(rig.context.agreement.known)
        assert not rig.tier.superseded()

    @pytest.mark.parametrize("when", range(3))
    def test_a_new_epoch_that_begins_while_they_are_written_again_stays_the_last_one(self, rig: Rig, when: int) -> None:
        begin(rig)
        look(rig)
        rig.tier.reset(rig.clock(), follow=True)
        look(rig, 0.0)
        old = rig.epoch
        rig.store.documents.clear()
        mark = new_invalidation()
        create, created = rig.store.create_document, 0

        def create_document(name: str, data: bytes) -> bytes | None:
            nonlocal created
            created += 1
            if created == when + 1:
                begin_common(rig.store, rig.context.namespace, mark)
            return create(name, data)

        rig.store.create_document = create_document  # type: ignore[method-assign]
        look(rig)
        found = find_common(rig.store, rig.context.namespace)
        assert mark in found.invalidations
        assert found.epoch != old, "blocks of the older epoch would count as younger"

    def test_an_older_document_after_a_newer_one_does_not_end_its_epoch(self, rig: Rig) -> None:
        namespace = rig.context.namespace
        before = {name: data for name, data in rig.store.documents.items() if name.startswith("epoch")}
        old = rig.epoch
        rig.store.documents.clear()
        mark = new_invalidation()
        begin_common(rig.store, namespace, mark)
        for name, data in before.items():
            rig.store.documents.setdefault(name, data)
        assert find_common(rig.store, namespace).epoch == old
        later = Rig(shared=True, store=rig.store, agreement=EpochAgreement()).opened()
        assert later.epoch != old
        assert later.context.agreement.known[0] == mark

    @pytest.mark.parametrize("lost", [0, 1])
    def test_before_the_last_one_bring_no_older_epoch_back(self, rig: Rig, lost: int) -> None:
        begin(rig)
        look(rig)
        rig.tier.reset(rig.clock(), follow=True)
        look(rig, 0.0)
        namespace = rig.context.namespace
        del rig.store.documents[epoch_document(namespace, lost)]
        assert Rig(shared=True, store=rig.store, agreement=EpochAgreement()).opened().epoch == rig.epoch
        begin(rig)
        look(rig)
        assert rig.tier.superseded(), "the new epoch begins after the last document"

    def test_before_the_last_one_are_noticed_by_the_next_look(self, rig: Rig) -> None:
        begin(rig)
        namespace = rig.context.namespace
        known = find_common(rig.store, namespace)
        first, _, last = known.documents
        del rig.store.documents[epoch_document(namespace, 1)]
        assert find_common(rig.store, namespace, known=known).documents == (first, None, last)

    def test_that_an_engine_has_not_read_hide_no_later_epoch_from_it(self, rig: Rig) -> None:
        namespace = rig.context.namespace
        unread = epoch_document(namespace, find_common(rig.store, namespace).count)
        begin(rig)
        last = begin(rig)
        del rig.store.documents[unread]
        look(rig)
        assert rig.tier.superseded(), "blocks that were invalidated are served"
        rig.tier.reset(rig.clock(), follow=True)
        assert rig.epoch == last

    def test_while_an_epoch_begins_leave_all_engines_with_the_same_epoch(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin(rig)
        store, namespace = rig.store, rig.context.namespace
        create = store.create_document

        def go_back_first(name: str, data: bytes) -> bytes | None:
            for number in (1, 2):
                store.documents.pop(epoch_document(namespace, number), None)
            return create(name, data)

        monkeypatch.setattr(store, "create_document", go_back_first)
        mark = new_invalidation()
        found = ensure_common(store, namespace, (mark,))
        assert found == find_common(store, namespace)
        assert found.covers((mark,))

    def test_are_unexplained_if_a_look_takes_longer_than_the_engine_can_be_sure(self, rig: Rig) -> None:
        rig.store.documents.clear()
        read = rig.store.read_document

        def read_document(name: str) -> bytes | None:
            rig.clock.advance(SURE_SECONDS)
            return read(name)

        rig.store.read_document = read_document  # type: ignore[method-assign]
        look(rig)
        assert rig.tier.superseded()

    def test_count_if_a_look_finds_them_that_the_tier_does_not_hear_of(self, rig: Rig) -> None:
        # The look has been waiting for a thread since before the tier opened its medium again.
        rig.context.agreement.in_use = True
        rig.clock.advance(LOOK_SECONDS)
        rig.finished()
        rig.context.agreement.learn([new_invalidation()], dropped=True)
        rig.io.run_tasks("open")
        rig.clock.advance(SURE_SECONDS + 1)
        rig.store.documents.clear()
        rig.io.run_tasks("epoch")
        rig.finished()
        look(rig)
        assert rig.tier.superseded(), "an epoch that began meanwhile may be lost too"

    @pytest.mark.parametrize(
        ("passed", "set_forward", "known"),
        [(30.0, 0.0, True), (30.0, 4e4, False), (30.0, -4e4, True), (120.0, -4e4, False)],
        ids=["", "the machine slept", "its clock was set back", "its clock was set back in an outage"],
    )
    def test_are_unexplained_after_a_sleep_of_the_machine_whatever_its_clock_was_set_to(
        self, rig: Rig, passed: float, set_forward: float, known: bool
    ) -> None:
        clock, wall = FakeClock(7.0), FakeClock(1e9)
        agreement = EpochAgreement()
        context = replace(rig.context, agreement=agreement, clock=clock)
        history = CommonHistory(context, rig.store, writes=True, wall=wall)
        before = history.look(opening=True)
        clock.advance(passed)
        wall.advance(passed + set_forward)
        rig.store.documents.clear()
        after = history.look()
        assert after.unexplained is not known
        assert (after == before) is known

    def test_a_damaged_document_is_replaced_by_an_engine_that_starts(self, rig: Rig) -> None:
        (last,) = [name for name in rig.store.documents if name.startswith("epoch") and name.endswith("-1")]
        rig.store.documents[last] = b"damaged"
        look(rig)
        assert (rig.tier.superseded(), available(rig)) == (False, (1, 1)), "another engine may be able to read it"
        later = Rig(shared=True, store=rig.store).opened()
        assert later.epoch != rig.epoch
        look(rig)
        assert rig.tier.superseded()
