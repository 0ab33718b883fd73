"""Leases on epochs that no document names: written soon after a reset, renewed, retried, left behind."""

from __future__ import annotations

import logging
import os
import socket

import pytest

from tests.block_tier.rig import K, Rig
from tiering.block_tier.epoch_chores import RENEWAL_SECONDS, RETRY_SECONDS
from tiering.epochs.documents import lease_document
from tiering.errors import TemporaryStoreError


def step(rig: Rig) -> list[str]:
    """Run a step with time for tasks; return the lease documents written in it."""
    for name in [name for name in rig.store.documents if name.startswith("lease-")]:
        del rig.store.documents[name]
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    return [name for name in rig.store.documents if name.startswith("lease-")]


def lease_of(rig: Rig) -> str:
    assert rig.tier.namespace is not None
    return lease_document(rig.tier.namespace)


def test_the_common_epoch_needs_no_lease() -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:1])
    assert step(rig) == []


@pytest.mark.parametrize("revision", [None, "step-1"])
def test_a_lease_is_written_after_a_reset_and_renewed_before_it_is_old(revision: str | None) -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.reset(rig.clock(), revision)
    assert step(rig) == [lease_of(rig)]
    rig.clock.advance(RENEWAL_SECONDS / 2)
    assert step(rig) == []
    rig.clock.advance(RENEWAL_SECONDS / 2)
    assert step(rig) == [lease_of(rig)]


def test_a_revision_of_the_stack_has_a_lease_from_the_start() -> None:
    rig = Rig(shared=True, revision="step-1").opened()
    assert step(rig) == [lease_of(rig)]


def test_after_another_reset_only_the_last_epoch_has_a_lease() -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.reset(rig.clock())
    first = step(rig)
    assert rig.tier.reset(rig.clock())
    assert step(rig) == [lease_of(rig)] != first


def test_a_lease_that_cannot_be_written_is_tried_again_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.reset(rig.clock())
    rig.store.failure = TemporaryStoreError("no")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert step(rig) == []
            rig.clock.advance(2 * RETRY_SECONDS)
    assert caplog.text.count("could not be renewed") == 1
    rig.store.failure = None
    assert step(rig) == [lease_of(rig)]


def test_a_tier_that_stores_nothing_and_a_medium_of_our_own_have_no_lease() -> None:
    writer = Rig(shared=True).opened()
    reader = Rig(shared=True, admission="none")
    reader.store.documents = writer.store.documents
    reader.opened()
    own = Rig().opened()
    for rig in (reader, own):
        assert rig.tier.reset(rig.clock() + 1)
        assert step(rig) == []


def test_a_tier_that_is_shut_down_renews_no_lease() -> None:
    rig = Rig(shared=True).opened()
    assert rig.tier.reset(rig.clock())
    assert rig.tier.shutdown(rig.clock() + 1)
    assert step(rig) == []


def test_the_name_of_the_machine_is_looked_up_on_the_io_side(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    rig = Rig(shared=True).opened()
    assert rig.tier.reset(rig.clock())

    def gethostname() -> str:
        called.append("")
        return "machine"

    monkeypatch.setattr(socket, "gethostname", gethostname)
    rig.tier.on_schedule_end()
    assert called == []
    rig.io.run_tasks()
    assert len(called) == 1
    assert rig.store.documents[lease_of(rig)] == f"process {os.getpid()} on machine\n".encode()
