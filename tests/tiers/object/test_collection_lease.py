"""The lease of collections where clocks are wrong: its time may lie in the future."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tests.fake_s3 import FakeS3
from tiering.errors import TemporaryStoreError
from tiers.object.collection_lease import NAME, SECONDS, CollectionLease
from tiers.object.store import ObjectStore

Open = Callable[..., ObjectStore]

DOCUMENT = f"prod/documents/{NAME}"
WRITTEN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()
"""The service's time of every write."""


def lease(store: ObjectStore, behind: float = 0.0) -> CollectionLease:
    """Return the lease of a machine whose clock is some seconds behind the service's."""
    return CollectionLease(store, "here", clock=lambda: WRITTEN - behind)


def leave_a_lease(fake: FakeS3, ahead: float) -> None:
    """Let the bucket hold a killed collection's lease, whose time lies in the future."""
    fake.objects[DOCUMENT] = b"host process 7 0a1b2c3d"
    fake.modified[DOCUMENT] = datetime.datetime.fromtimestamp(WRITTEN + ahead, datetime.UTC)


@pytest.mark.parametrize("ahead", [SECONDS, 3600.0, 1e8])
def test_a_lease_further_in_the_future_than_a_lease_can_be_is_no_lease(
    ahead: float, fake: FakeS3, open_store: Open
) -> None:
    leave_a_lease(fake, ahead)
    next_one = lease(open_store())
    next_one._acquire()
    assert next_one.renew()


@pytest.mark.parametrize("ahead", [1.0, SECONDS - 1])
def test_clocks_that_differ_less_leave_a_lease_as_it_is(ahead: float, fake: FakeS3, open_store: Open) -> None:
    leave_a_lease(fake, ahead)
    with pytest.raises(TemporaryStoreError, match="another collection of here runs"):
        lease(open_store())._acquire()
    assert fake.objects[DOCUMENT] == b"host process 7 0a1b2c3d"


def test_one_of_two_machines_that_find_such_a_lease_gets_the_next_one(
    fake: FakeS3, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_lease(fake, 3600.0)
    first, second = lease(open_store()), open_store()
    read = second.read_version

    def read_before_the_first_one_acquires(name: str) -> object:
        found = read(name)
        first._acquire()
        return found

    monkeypatch.setattr(second, "read_version", read_before_the_first_one_acquires)
    with pytest.raises(TemporaryStoreError, match="another collection of here runs"):
        lease(second)._acquire()
    assert first.renew()


def test_a_machine_whose_clock_is_far_behind_ends_a_collection_that_lives(fake: FakeS3, open_store: Open) -> None:
    living, behind = lease(open_store()), lease(open_store(), behind=SECONDS)
    living._acquire()
    behind._acquire()
    assert not living.renew()
    assert behind.renew()
    with pytest.raises(TemporaryStoreError, match="another collection of here runs"):
        lease(open_store())._acquire()
