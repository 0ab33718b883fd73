"""The service of a tier by itself: attempts to open, waits between them, epochs, log of failures."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.block_tier.fakes import FakeIo, FakeStore, make_context, make_namespace
from tests.epochs.common import find_common
from tiering.block_tier.service import IN_USE_SECONDS, TierService
from tiering.epochs.documents import EpochDocument, epoch_document
from tiering.epochs.driver import begin_common
from tiering.epochs.opener import Opener
from tiering.epochs.state import Entered
from tiering.errors import InUseError, StoreError, TemporaryStoreError
from tiering.secondary.options import BreakerOptions
from tiering.testing.clock import FakeClock

NAMESPACE = make_namespace()
OPTIONS = BreakerOptions(probe_after=1.0, probe_max=60.0)
DOCUMENT = epoch_document(NAMESPACE)


class Rig:
    """A service over a fake store, whose attempts run when a test lets them."""

    def __init__(self, *, shared: bool = False) -> None:
        self.clock = FakeClock()
        self.store = FakeStore()
        self.io = FakeIo(self.store, self.clock, OPTIONS)
        self.entered: list[Entered] = []
        self.context = replace(make_context(self.clock), namespace=NAMESPACE)
        self.opener = Opener(self.context, self.store, shared=shared)
        self.service = TierService(self.context, self.opener, self.io, OPTIONS, self.entered.append)

    def attempt(self, failure: StoreError | None = None) -> None:
        """Run the attempt that has been started; the store raises ``failure``."""
        self.store.failure = failure
        self.io.run_tasks()
        self.io.poll()

    def wait(self, seconds: float) -> int:
        """Advance the clock, and return the number of attempts that were started."""
        before = len(self.io.ran)
        self.clock.advance(seconds)
        self.service.tick(self.clock())
        return len(self.io.ran) - before

    def opened(self) -> Rig:
        self.service.start()
        self.attempt()
        assert self.service.in_service
        return self


DOWN = TemporaryStoreError("no answer")


# -------------------------------------------------------------------------------------------------------------- opening


def test_a_medium_that_answers_is_in_service_after_one_attempt() -> None:
    rig = Rig()
    rig.service.start()
    assert (rig.service.running, rig.service.in_service) == (True, False)
    rig.attempt()
    assert (rig.service.running, rig.service.in_service, rig.service.error) == (False, True, None)
    assert [entered.namespace.base for entered in rig.entered] == [NAMESPACE.base]


def test_one_attempt_runs_at_a_time() -> None:
    rig = Rig()
    rig.service.start()
    rig.service.start()
    assert len(rig.io.ran) == 1
    rig.attempt()
    rig.service.start()
    assert len(rig.io.ran) == 1


def test_the_next_attempt_starts_when_its_wait_is_over_and_not_before(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.service.start()
    rig.attempt(DOWN)
    assert (rig.service.in_service, rig.service.error, rig.service.failures) == (False, DOWN, 1)
    assert rig.wait(0.7) == 0
    assert rig.wait(0.6) == 1
    rig.attempt(DOWN)
    assert rig.wait(1.5) == 0
    assert rig.wait(1.0) == 1
    with caplog.at_level(logging.INFO):
        rig.attempt()
    assert rig.service.in_service
    assert rig.service.failures == 0
    assert caplog.text.count("not in service") == 1
    assert "in service again after 2 failed attempts" in caplog.text


def test_a_medium_that_another_process_uses_is_tried_at_short_intervals_however_long_that_lasts() -> None:
    rig = Rig()
    rig.service.start()
    for _ in range(12):
        rig.attempt(InUseError("process 7 uses it"))
        assert rig.wait(1.2 * IN_USE_SECONDS) == 1


def test_a_service_that_was_stopped_starts_nothing_and_ignores_an_attempt_that_ends() -> None:
    rig = Rig()
    rig.service.start()
    rig.service.stop()
    rig.attempt()
    assert not rig.service.in_service
    assert rig.entered == []
    assert rig.wait(1000.0) == 0


# --------------------------------------------------------------------------------------------------------------- epochs


def test_a_reset_of_an_own_medium_is_out_of_service_until_its_document_is_written() -> None:
    rig = Rig().opened()
    target = rig.opener.target(None)
    rig.service.leave(target)
    assert not rig.service.in_service
    rig.attempt(DOWN)
    assert not rig.service.in_service
    rig.attempt()
    assert rig.service.in_service
    assert rig.entered[-1].namespace.epoch == target.namespace.epoch
    found = EpochDocument.parse(rig.store.documents[DOCUMENT])
    assert found is not None
    assert (found.epoch, found.private) == (target.namespace.epoch, True)


def test_a_reset_of_a_shared_medium_moves_at_once_and_writes_nothing() -> None:
    rig = Rig(shared=True).opened()
    documents = dict(rig.store.documents)
    target = rig.opener.target(None)
    rig.service.leave(target)
    assert rig.service.in_service
    assert rig.entered[-1] == Entered(target.namespace)
    assert rig.store.documents == documents
    assert not rig.io.tasks


def test_the_later_of_two_resets_counts_if_an_attempt_for_the_earlier_one_runs() -> None:
    rig = Rig().opened()
    first, second = rig.opener.target(None), rig.opener.target("new weights")
    rig.service.leave(first)
    rig.service.leave(second)
    rig.attempt()
    assert not rig.service.in_service
    rig.attempt()
    assert rig.service.in_service
    assert rig.entered[-1].namespace.epoch == second.namespace.epoch


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("revision", [None, "new weights"])
def test_a_reset_while_the_attempt_for_an_earlier_one_ends_enters_an_epoch_of_its_own_kind(
    shared: bool, revision: str | None
) -> None:
    """An epoch that is held is as new as the one asked for, but only if the same processes may read it."""
    rig = Rig(shared=shared)
    rig.service.start()
    first, second = rig.opener.target(None), rig.opener.target(revision)
    rig.service.leave(first)
    rig.attempt()
    rig.io.run_tasks()
    rig.service.leave(second)
    for _ in range(2):
        rig.io.poll()
        rig.io.run_tasks()
    entered = first if revision is None else second
    assert [found.namespace for found in rig.entered] == [entered.namespace]
    if not shared:
        stored = EpochDocument.parse(rig.store.documents[DOCUMENT])
        assert stored is not None
        assert (stored.epoch, stored.private) == (entered.namespace.epoch, entered.private)


def test_a_suspended_service_enters_nothing_until_it_is_resumed() -> None:
    rig = Rig().opened()
    rig.service.suspend()
    rig.service.start()
    assert not rig.service.running
    rig.service.resume(None)
    rig.attempt()
    assert rig.service.in_service
    assert rig.store.opened == 2


def test_an_attempt_on_a_medium_that_was_left_meanwhile_does_not_count() -> None:
    rig = Rig(shared=True)
    rig.service.start()
    rig.io.run_tasks()
    rig.service.suspend()
    rig.service.resume(None)
    rig.store.documents.clear()
    rig.io.poll()
    assert (rig.entered, rig.service.in_service) == ([], False)
    rig.attempt()
    (entered,) = rig.entered
    assert entered.common == find_common(rig.store, NAMESPACE)


def test_an_attempt_that_began_before_the_medium_was_to_be_opened_again_does_not_count() -> None:
    rig = Rig(shared=True)
    rig.service.start()
    rig.io.run_tasks()
    begun = begin_common(rig.store, NAMESPACE)
    rig.service.again()
    rig.io.poll()
    assert (rig.entered, rig.service.in_service) == ([], False)
    rig.attempt()
    assert rig.entered == [Entered(NAMESPACE.with_epoch(begun.epoch or b""), begun)]


def test_an_attempt_that_fails_after_it_was_overtaken_is_tried_again_after_a_wait() -> None:
    rig = Rig(shared=True)
    rig.service.start()
    rig.service.again()
    rig.attempt(DOWN)
    assert rig.wait(0.7) == 0
    assert rig.wait(0.6) == 1
    rig.attempt()
    assert rig.service.in_service


def test_an_epoch_that_was_entered_for_a_reset_is_not_the_common_one_that_was_found_before() -> None:
    rig = Rig(shared=True)
    rig.service.start()
    rig.io.run_tasks()
    target = rig.opener.target(None)
    rig.service.leave(target)
    rig.io.poll()
    rig.attempt()
    assert rig.entered == [Entered(target.namespace)]
    assert rig.opener.needs_lease(rig.entered[0])


def test_the_next_process_enters_the_epoch_of_the_document_unless_a_reset_made_it_private() -> None:
    rig = Rig().opened()
    (first,) = rig.entered
    assert Opener(rig.context, rig.store).enter(None) == first
    rig.service.leave(rig.opener.target(None))
    rig.attempt()
    later = Opener(rig.context, rig.store).enter(None)
    assert later.namespace.epoch not in {entered.namespace.epoch for entered in rig.entered}


def test_an_epoch_document_is_read_back_and_refused_if_a_byte_differs() -> None:
    document = EpochDocument.of(NAMESPACE.next_epoch(), "weights 7", private=True)
    packed = document.pack()
    assert EpochDocument.parse(packed) == document
    for at in range(len(packed)):
        assert EpochDocument.parse(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]) is None
    for wrong in (b"", packed[:-1], packed + b"\0"):
        assert EpochDocument.parse(wrong) is None


@pytest.mark.parametrize(
    ("private", "revision", "asked", "admitted"),
    [
        (False, None, None, True),
        (True, None, None, False),
        (False, "a", "a", True),
        (False, "a", "b", False),
        (False, "a", None, False),
        (False, None, "a", False),
    ],
)
def test_an_epoch_admits_processes_of_its_revision_only(
    private: bool, revision: str | None, asked: str | None, admitted: bool
) -> None:
    document = EpochDocument.of(NAMESPACE.next_epoch(), revision, private=private)
    assert document.admits(NAMESPACE, asked) is admitted
    assert not document.admits(make_namespace("another model"), asked)
