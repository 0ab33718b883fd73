"""A block tier's documents with hot keys: when they are written and read, and what is left out."""

from __future__ import annotations

import time

import pytest

from tests.block_tier.rig import K, Rig
from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.block_tier.hint_documents import MOST_READ
from tiering.epochs.hot_keys import HOT, hot_document, pack
from tiering.errors import TemporaryStoreError
from tiering.secondary.contract import MAX_ENGINES


def namespace_of(rig: Rig) -> Namespace:
    namespace = rig.tier.namespace
    assert namespace is not None
    return namespace


def publish(rig: Rig, *chains: tuple[OffloadKey, ...]) -> None:
    part = rig.tier.traits.hot_keys
    assert part is not None
    part.publish(chains)
    rig.io.run_tasks()
    rig.io.poll()


def gather(rig: Rig) -> list[list[list[OffloadKey]]] | None:
    """Return what the tier gathers once its I/O has run; the first question starts that."""
    part = rig.tier.traits.hot_keys
    assert part is not None
    assert part.gather() is None
    rig.io.run_tasks()
    rig.io.poll()
    found = part.gather()
    return None if found is None else [[list(run) for run in runs] for runs in found]


def test_an_engine_reads_what_an_engine_of_its_epoch_has_published() -> None:
    rig = Rig(shared=True).opened()
    publish(rig, tuple(K[:3]), tuple(K[3:5]))
    assert gather(rig) == [[K[3:5], K[:3]]]
    assert rig.tier.get_stats().hot_keys_written == 1


def test_one_engine_replaces_its_own_document() -> None:
    rig = Rig(shared=True).opened()
    publish(rig, tuple(K[:3]))
    publish(rig, tuple(K[3:5]))
    assert gather(rig) == [[K[3:5]]]


def test_what_comes_while_a_document_is_written_follows() -> None:
    rig = Rig(shared=True).opened()
    part = rig.tier.traits.hot_keys
    assert part is not None
    part.publish([tuple(K[:3])])
    part.publish([tuple(K[3:5])])
    rig.io.run_tasks()
    rig.io.poll()
    assert gather(rig) == [[K[3:5]]]


def test_before_the_tier_is_in_an_epoch_nothing_is_published_or_known() -> None:
    rig = Rig(shared=True)
    publish(rig, tuple(K[:3]))
    part = rig.tier.traits.hot_keys
    assert part is not None
    assert part.gather() is None
    assert [task.name for task in rig.io.ran] == []


def test_documents_that_do_not_count_are_refused_and_the_others_read() -> None:
    rig = Rig(shared=True).opened()
    now, namespace = time.time(), namespace_of(rig)
    good = pack(namespace, now, [K[:3]])
    rig.store.documents |= {
        hot_document(namespace, "good"): good,
        hot_document(namespace, "stale"): pack(namespace, now - 3600, [K[:3]]),
        hot_document(namespace, "another epoch"): pack(namespace.next_epoch(), now, [K[:3]]),
        hot_document(namespace, "damaged"): good[:-1],
        hot_document(namespace, "empty"): b"",
        hot_document(namespace, "huge"): bytes(1 << 20),
        f"{HOT}{'0' * 32}-{'0' * 16}": good,
    }
    assert gather(rig) == [[K[:3]]]
    assert rig.tier.get_stats().hot_keys_refused == 5


def test_a_document_that_is_gone_when_it_is_read_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Valkey server drops documents by itself, and ``gc`` removes them while engines start."""
    rig = Rig(shared=True).opened()
    publish(rig, tuple(K[:3]))
    names = [*rig.store.documents, hot_document(namespace_of(rig), "gone")]
    monkeypatch.setattr(rig.store, "list_documents", lambda prefix: [name for name in names if name.startswith(prefix)])
    assert gather(rig) == [[K[:3]]]
    assert rig.tier.get_stats().hot_keys_refused == 0


@pytest.mark.parametrize(("good", "stale", "expected"), [(100, 0, 32), (10, 110, 10), (0, 500, 0)])
def test_engines_that_have_ended_hide_no_others_and_cost_a_bounded_number_of_reads(
    good: int, stale: int, expected: int
) -> None:
    rig = Rig(shared=True).opened()
    namespace, now = namespace_of(rig), time.time()
    fresh, old = (pack(namespace, at, [K[:1]]) for at in (now, now - 3600))
    rig.store.documents |= {hot_document(namespace, f"good {n}"): fresh for n in range(good)}
    rig.store.documents |= {hot_document(namespace, f"stale {n}"): old for n in range(stale)}
    found = gather(rig)
    assert found is not None
    assert len(found) == expected <= MAX_ENGINES == 32
    assert rig.tier.get_stats().hot_keys_refused == min(stale, MOST_READ)


def test_a_medium_that_fails_costs_one_warning_and_the_warm_start(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(shared=True).opened()
    rig.store.failure = TemporaryStoreError("out of order")
    for _ in range(3):
        publish(rig, tuple(K[:3]))
    assert [record.getMessage() for record in caplog.records if "publish" in record.getMessage()] == [
        "tier t: cannot publish the keys for a warm start: out of order"
    ]
    rig.store.documents[hot_document(namespace_of(rig), "x")] = b""
    assert gather(rig) == []


def test_what_was_read_in_an_epoch_that_the_tier_has_left_does_not_count() -> None:
    rig = Rig(shared=True).opened()
    publish(rig, tuple(K[:3]))
    part = rig.tier.traits.hot_keys
    assert part is not None
    assert part.gather() is None
    rig.io.run_tasks()
    rig.tier.reset(rig.clock() + 1)
    assert gather(rig) == []


def test_what_no_other_engine_could_load_is_not_published() -> None:
    private, reader = Rig(shared=True).opened(), Rig(shared=True, admission="none")
    assert private.tier.reset(private.clock() + 1)
    publish(private, tuple(K[:3]))
    reader.store.documents = dict(private.store.documents)
    assert reader.tier.open(reader.clock() + 1)
    publish(reader, tuple(K[:3]))
    assert [name for rig in (private, reader) for name in rig.store.documents if name.startswith(HOT)] == []


def test_a_medium_of_one_process_has_one_document() -> None:
    rig = Rig().opened()
    publish(rig, tuple(K[:3]))
    assert [name for name in rig.store.documents if name.startswith(HOT)] == [hot_document(namespace_of(rig), "")]


def test_a_shutdown_waits_for_the_document_but_not_for_a_medium_that_hangs() -> None:
    rig = Rig(shared=True).opened()
    part = rig.tier.traits.hot_keys
    assert part is not None
    part.publish([tuple(K[:3])])
    assert rig.tier.shutdown(rig.clock() + 8)
    assert any(name.startswith(HOT) for name in rig.store.documents)
    hung = Rig(shared=True).opened()
    part = hung.tier.traits.hot_keys
    assert part is not None
    part.publish([tuple(K[:3])])
    hung.io.hold = True
    assert hung.tier.shutdown(hung.clock() + 8)
    assert not any(name.startswith(HOT) for name in hung.store.documents)
