"""Epochs and resets of the generic tier: documents that make blocks readable, and a reset's promises."""

from __future__ import annotations

import pytest

from tests.block_tier.fakes import BLOCK_BYTES, NUM_ROWS, FakeStore
from tests.block_tier.rig import CTX, K, Rig
from tiering.api.namespace import NO_EPOCH, Namespace
from tiering.epochs.documents import EpochDocument
from tiering.errors import ConfigError, PermanentStoreError, TemporaryStoreError
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.primary.memory.region import SharedRegion
from tiering.secondary.contract import PrefixAnswer


def restarted(before: Rig, **options: object) -> Rig:
    """Return an opened tier of a later process on the same medium."""
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.store.documents = before.store.documents
    return rig.opened()


# ------------------------------------------------------------------------------------------------------------ documents


def test_the_stored_epoch_is_the_one_served() -> None:
    rig = Rig()
    namespace = rig.context.namespace.next_epoch()
    rig.store.documents[rig.document] = EpochDocument.of(namespace, None, private=False).pack()
    rig.opened().submit_store(K[:1])
    assert rig.io.jobs[0].fingerprint == namespace.fingerprint


def test_a_first_epoch_is_random_and_found_by_later_processes() -> None:
    first, other = Rig().opened(), Rig().opened()
    assert first.epoch != other.epoch
    assert first.epoch != NO_EPOCH
    assert restarted(first).epoch == first.epoch


def _zeroed(document: bytes) -> bytes:
    return bytes(len(document))


def _flipped(document: bytes) -> bytes:
    return bytes([*document[:20], document[20] ^ 1, *document[21:]])


def _of_the_format_before(document: bytes) -> bytes:
    return document[16:32]


@pytest.mark.parametrize(
    "damage", [_zeroed, _flipped, _of_the_format_before, lambda document: document[:-1], lambda document: b""]
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_document_begins_a_new_epoch_loudly(
    shared: bool, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    before = Rig(shared=shared).opened()
    before.store.documents[before.document] = damage(before.store.documents[before.document])  # type: ignore[operator]
    rig = restarted(before, shared=shared)
    assert rig.epoch != before.epoch
    assert "is damaged: a new epoch begins" in caplog.text
    assert restarted(rig, shared=shared).epoch == rig.epoch


@pytest.mark.parametrize("shared", [False, True])
def test_a_missing_document_begins_a_new_epoch_loudly(shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = Rig(shared=shared).opened()
    assert "missing" not in caplog.text
    del before.store.documents[before.document]
    rig = restarted(before, shared=shared)
    assert rig.epoch != before.epoch
    assert "is missing: a new epoch begins" in caplog.text


def test_a_document_of_another_namespace_is_nobodys() -> None:
    rig = Rig()
    other = Namespace("other parameters").next_epoch()
    rig.store.documents[rig.document] = EpochDocument.of(other, None, private=False).pack()
    assert rig.opened().epoch != other.epoch


def test_a_reader_on_a_shared_medium_waits_for_somebody_who_stores() -> None:
    reader, writer = Rig(shared=True, admission="none"), Rig(shared=True)
    reader.store.documents = writer.store.documents
    assert not reader.tier.open(reader.clock() + 1)
    assert writer.store.documents == {}
    writer.opened()
    reader.clock.advance(100)
    reader.tier.on_schedule_end()
    reader.io.run_tasks()
    reader.finished()
    assert reader.epoch == writer.epoch


# --------------------------------------------------------------------------------------------------------------- resets


def test_after_a_reset_nothing_stored_before_is_held_and_jobs_carry_a_new_fingerprint() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.submit_store(K[2:3])
    before = rig.io.finish(2).fingerprint
    assert rig.tier.reset(rig.clock() + 1) is True
    assert rig.tier.lookup_prefix(K[:3], CTX) == PrefixAnswer(0, False)
    rig.submit_store(K[:1])
    assert rig.io.jobs[-1].fingerprint != before


def test_jobs_that_a_reset_overtakes_end_as_failed_and_are_not_held() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    load, store = rig.submit_load(K[:2]), rig.submit_store(K[2:4])
    assert rig.tier.reset(rig.clock() + 1) is True
    rig.io.finish(load)
    rig.io.finish(store)
    assert [(result.success, result.successful_keys) for result in rig.finished()] == [(False, []), (False, [])]
    assert [rig.tier.lookup(key, CTX) for key in K[:4]] == [False] * 4
    rig.store_blocks(K[:4])
    assert rig.tier.lookup_prefix(K[:4], CTX).held == 4


def test_jobs_that_ended_just_before_a_reset_are_reported_as_failed() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    job_id = rig.submit_load(K[:2])
    rig.io.finish(job_id)
    rig.tier.drain(rig.clock() + 1)
    rig.tier.reset(rig.clock() + 1)
    assert [(result.job_id, result.success, result.successful_keys) for result in rig.finished()] == [
        (job_id, False, [])
    ]


def test_an_epoch_that_a_reset_began_is_entered_by_no_other_process() -> None:
    rig = Rig().opened()
    rig.tier.reset(rig.clock() + 1)
    restarted = Rig()
    restarted.store.documents = rig.store.documents
    restarted.opened()
    later = Rig()
    later.store.documents = rig.store.documents
    later.opened()
    epochs = [rig.context.namespace, rig.tier.namespace, restarted.tier.namespace]
    assert len(set(epochs)) == 3
    assert later.tier.namespace == restarted.tier.namespace


def test_a_reset_whose_epoch_cannot_be_written_takes_the_tier_out_of_service_until_it_is() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.store.failure = TemporaryStoreError("no")
    assert rig.tier.reset(rig.clock() + 1) is False
    assert rig.submit_store(K[:1])
    assert rig.finished()[0].success is False
    rig.store.failure = None
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is False
    rig.store_blocks(K[:1])
    document = EpochDocument.parse(rig.store.documents[rig.document])
    assert document is not None
    assert document.private
    assert document.epoch == rig.tier.namespace.epoch  # type: ignore[union-attr]


def test_a_manager_takes_a_tier_back_when_its_reset_could_be_completed() -> None:
    rig = Rig().opened()
    region = SharedRegion.create(NUM_ROWS, BLOCK_BYTES)
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(region), [rig.tier], clock=rig.clock)
    rig.store.failure = TemporaryStoreError("no")
    assert manager.reset_cache() is False
    rig.store.failure = None
    rig.clock.advance(100)
    for _ in range(3):
        manager.on_schedule_end()
        rig.io.run_tasks()
    manager.on_new_request(CTX)
    manager.prepare_store(K[:1], CTX)
    manager.complete_store(K[:1], CTX)
    assert [list(job.moved) for job in rig.io.jobs] == [K[:1]]
    rig.io.finish_all()
    manager.shutdown()


def test_a_reset_before_the_medium_could_be_opened_holds_when_it_is() -> None:
    rig = Rig()
    rig.store.failure = TemporaryStoreError("no")
    rig.tier.open(rig.clock() + 1)
    assert rig.tier.reset(rig.clock() + 1) is False
    rig.store.failure = None
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.namespace is not None
    assert rig.tier.namespace.fingerprint != rig.context.namespace.fingerprint


def test_a_reset_while_the_medium_is_being_opened_holds_when_it_is() -> None:
    rig = Rig()
    rig.io.hold = True
    rig.tier.open(rig.clock() + 1)
    assert rig.tier.reset(rig.clock() + 1) is False
    for _ in range(2):
        rig.io.run_tasks()
        rig.finished()
    assert rig.tier.namespace is not None
    assert rig.tier.namespace.fingerprint != rig.context.namespace.fingerprint


class _Refusing(FakeStore):
    """A store that refuses some calls on documents."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)
        self.written: list[str] = []

    def write_document(self, name: str, data: bytes) -> None:
        if "write" in self.refused:
            raise PermanentStoreError("full")
        self.written.append(name)
        super().write_document(name, data)

    def remove_document(self, name: str) -> None:
        if "remove" in self.refused:
            raise PermanentStoreError("read-only")
        self.documents.pop(name, None)


@pytest.mark.parametrize(
    ("refused", "certain"), [("write", True), ("remove", True), ("", True), ("write remove", False)]
)
def test_a_reset_is_certain_exactly_if_no_later_process_can_read_what_was_stored_before(
    refused: str, certain: bool
) -> None:
    store = _Refusing()
    rig = Rig(store=store).opened()
    before = rig.epoch
    store.refused = set(refused.split())
    assert rig.tier.reset(rig.clock() + 1) is certain
    store.refused = set()
    assert (restarted(rig).epoch != before) is certain


def test_an_index_that_breaks_at_a_reset_does_not_keep_the_medium_from_forgetting() -> None:
    rig = Rig().opened()
    before = rig.epoch

    def broken() -> list[bytes]:
        raise KeyError("slot 7")

    rig.tier.index.clear = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyError):
        rig.tier.reset(rig.clock() + 1)
    rig.io.run_tasks()
    assert restarted(rig).epoch != before
    assert rig.tier.lookup(K[0], CTX) is False


def test_a_reset_waits_no_longer_than_its_deadline_for_a_medium_that_hangs() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.submit_store(K[2:4])
    rig.io.hold = True
    begun = rig.clock()
    assert rig.tier.reset(begun + 0.05) is False
    assert rig.clock() - begun <= 0.051
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, False)
    assert rig.tier.on_schedule_end().reset_done is False
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.on_schedule_end().reset_done is True


def test_two_resets_in_a_row_end_in_the_last_one() -> None:
    rig = Rig().opened()
    rig.io.hold = True
    assert rig.tier.reset(rig.clock(), "step-1") is False
    assert rig.tier.reset(rig.clock(), "step-2") is False
    for _ in range(3):
        rig.io.run_tasks()
        rig.finished()
    assert rig.tier.on_schedule_end().reset_done
    assert restarted(rig, revision="step-2").epoch == rig.epoch
    assert restarted(rig, revision="step-1").epoch != rig.epoch


# ------------------------------------------------------------------------------------------------------------ revisions


def test_on_a_medium_of_our_own_a_revision_keeps_its_blocks_for_later_processes_of_that_revision() -> None:
    rig = Rig().opened()
    assert rig.tier.reset(rig.clock() + 1, "step-1")
    assert restarted(rig, revision="step-1").epoch == rig.epoch
    assert restarted(rig).epoch != rig.epoch


def test_going_back_to_a_revision_on_a_medium_of_our_own_serves_nothing_that_was_stored_in_it_before() -> None:
    rig = Rig(revision="step-1").opened()
    first = rig.epoch
    assert rig.tier.reset(rig.clock() + 1, "step-2")
    assert rig.tier.reset(rig.clock() + 1, "step-1")
    assert rig.epoch != first


@pytest.mark.parametrize("revision", ["", "  ", 7])
def test_a_revision_that_names_nothing_is_refused_before_anything_is_done(revision: object) -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:1])
    with pytest.raises(ConfigError, match="revision"):
        rig.tier.reset(rig.clock() + 1, revision)  # type: ignore[arg-type]
    assert rig.tier.lookup(K[0], CTX) is True


# --------------------------------------------------------------------------------------------------------- shared media


def test_a_reset_on_a_shared_medium_is_certain_at_once_and_asks_the_medium_nothing() -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:2])
    documents = dict(rig.store.documents)
    rig.io.hold = True
    begun = rig.clock()
    assert rig.tier.reset(begun + 1) is True
    assert rig.clock() == begun
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, True)
    assert rig.store.documents == documents
    rig.io.hold = False
    rig.store_blocks(K[2:4])
    assert rig.tier.lookup_prefix(K[2:4], CTX) == PrefixAnswer(2, False)


def test_a_reset_moves_one_process_of_a_shared_medium_and_a_revision_brings_them_together() -> None:
    one = Rig(shared=True).opened()
    two = restarted(one, shared=True)
    assert one.epoch == two.epoch
    common = one.epoch
    assert one.tier.reset(one.clock() + 1)
    assert two.tier.reset(two.clock() + 1)
    assert len({common, one.epoch, two.epoch}) == 3
    assert [rig.tier.get_stats().private_epoch for rig in (one, two)] == [1, 1]
    for rig in (one, two):
        assert rig.tier.reset(rig.clock() + 1, "step-1")
    assert [rig.tier.get_stats().private_epoch for rig in (one, two)] == [0, 0]
    assert one.epoch == two.epoch == restarted(one, shared=True, revision="step-1").epoch
    assert restarted(one, shared=True).epoch == common


def test_a_reset_before_a_shared_medium_is_open_holds_when_it_is() -> None:
    rig = Rig(shared=True)
    rig.store.failure = TemporaryStoreError("no")
    rig.tier.open(rig.clock() + 1)
    assert rig.tier.reset(rig.clock() + 1) is True
    rig.store.failure = None
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is None
    assert restarted(rig, shared=True).epoch != rig.epoch


def test_jobs_under_way_do_not_count_across_a_reset_to_the_revision_that_is_in_force() -> None:
    rig = Rig(shared=True, revision="step-1").opened()
    job_id = rig.submit_store(K[:2])
    assert rig.tier.reset(rig.clock() + 1, "step-1")
    rig.io.finish(job_id)
    assert [result.success for result in rig.finished()] == [False]
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, True)


class _Racing(FakeStore):
    """A shared store in which another process always creates a document first."""

    def __init__(self, winner: bytes) -> None:
        super().__init__()
        self.winner = winner

    def create_document(self, name: str, data: bytes) -> bytes | None:
        self.documents.setdefault(name, self.winner)
        return self.documents[name]


def test_who_comes_second_takes_the_epoch_of_who_came_first() -> None:
    first = Rig(shared=True).opened()
    second = Rig(shared=True, store=_Racing(first.store.documents[first.document])).opened()
    assert second.epoch == first.epoch
