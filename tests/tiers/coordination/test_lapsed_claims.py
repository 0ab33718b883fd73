"""A machine that is slow, withdraws an upload or was killed ends no claim of another one."""

from __future__ import annotations

import pytest

from tiers.coordination.directory import Directory, digests_of, load_scripts
from tiers.coordination.scope import Claim, Scope
from tiers.valkey.client import ValkeyClient


@pytest.fixture
def loaded(client: ValkeyClient) -> ValkeyClient:
    client.replies(load_scripts())
    return client


def machine(client: ValkeyClient) -> Scope:
    """Return what a machine says about one epoch of a bucket."""
    return Scope(Directory(client, b"bucket", "namespace/epoch/"), lambda: None, lambda places: None)


def claim(client: ValkeyClient, scope: Scope, *places: str) -> list[bool]:
    """Claim uploads, and return which are granted."""
    asked = Claim(places)
    scope.queue.claims.append(asked)
    scope.send(client)
    assert asked.granted is not None
    return list(asked.granted)


def lapse(client: ValkeyClient, scope: Scope, *places: str) -> None:
    """Let the time of claims pass."""
    for place in places:
        assert client.call("PEXPIRE", f"{scope.directory.name}:lease:".encode() + digests_of([place]), 0) == 1


def test_a_withdrawn_upload_gives_back_only_the_claims_that_have_not_lapsed(loaded: ValkeyClient) -> None:
    slow, other, third = machine(loaded), machine(loaded), machine(loaded)
    assert claim(loaded, slow, "a", "b") == [True, True]
    assert claim(loaded, other, "a", "b") == [False, False]
    lapse(loaded, slow, "a")
    assert claim(loaded, other, "a", "b") == [True, False]
    slow.queue.released.extend(["a", "b"])
    slow.send(loaded)
    assert claim(loaded, third, "a", "b") == [False, True]


def test_an_upload_that_ends_after_its_claim_has_lapsed_leaves_that_of_the_next_machine(loaded: ValkeyClient) -> None:
    slow, other, third = machine(loaded), machine(loaded), machine(loaded)
    assert claim(loaded, slow, "a") == [True]
    lapse(loaded, slow, "a")
    assert claim(loaded, other, "a") == [True]
    slow.store(["a"])
    slow.send(loaded)
    assert claim(loaded, third, "a") == [False]
    other.store(["a"])
    other.send(loaded)
    assert claim(loaded, third, "a") == [True]


def test_claims_of_a_machine_that_was_killed_lapse_and_its_late_words_change_nothing(loaded: ValkeyClient) -> None:
    killed, other, third = machine(loaded), machine(loaded), machine(loaded)
    assert claim(loaded, killed, "a", "b") == [True, True]
    late = killed.directory.release(digests_of(["a", "b"]))  # on its way when the machine was killed
    lapse(loaded, killed, "a", "b")
    assert claim(loaded, other, "a", "b") == [True, True]
    assert loaded.call(*late) == 0
    assert claim(loaded, third, "a", "b") == [False, False]
    assert loaded.call(*other.directory.release(digests_of(["a", "b"]))) == 2
