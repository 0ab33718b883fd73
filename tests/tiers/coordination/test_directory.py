"""The scripts in the server: a directory that grows within its bound, claims, and touches."""

from __future__ import annotations

import pytest

from tiers.coordination.directory import LEASE_MS, Directory, digests_of, load_scripts
from tiers.valkey.client import ValkeyClient


@pytest.fixture
def directory(client: ValkeyClient) -> Directory:
    client.replies(load_scripts())
    return Directory(client, b"bucket", "namespace/epoch/")


def names(count: int, prefix: str = "held") -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def fill(directory: Directory, places: list[str]) -> None:
    for at in range(0, len(places), 500):
        directory.fill(digests_of(places[at : at + 500]))


def test_held_blocks_are_affirmed_and_few_others_in_at_most_three_bytes_per_block(
    directory: Directory, client: ValkeyClient
) -> None:
    held = names(40_000)
    fill(directory, held)
    for at in range(0, len(held), 1000):
        assert all(directory.answers(digests_of(held[at : at + 1000]))[1])
    others = names(4000, "other")
    false = sum(sum(directory.answers(digests_of(others[at : at + 500]))[1]) for at in range(0, 4000, 500))
    assert false < 0.02 * len(others)
    used = sum(client.call("MEMORY", "USAGE", key) for key in client.call("KEYS", f"{directory.name}*"))
    assert used < 3 * len(held)


def test_a_block_that_is_added_again_takes_no_room(directory: Directory, client: ValkeyClient) -> None:
    for _ in range(3):
        directory.fill(digests_of(names(10)))
    assert client.call("HGET", directory.name, "count") == b"10"


def test_a_directory_is_complete_only_for_the_generation_that_was_filled(
    directory: Directory, client: ValkeyClient
) -> None:
    assert directory.answers(digests_of(names(1))) == (False, [False])
    generation = directory.fill(b"")
    assert directory.finish(generation)
    assert directory.answers(b"") == (True, [])
    client.call(*directory.distrust())
    assert directory.answers(b"") == (False, [])
    client.call("DEL", directory.name)
    assert not directory.finish(generation)


def test_all_keys_expire(directory: Directory, client: ValkeyClient) -> None:
    directory.fill(digests_of(names(10)))
    client.call(*directory.touch(digests_of(names(1))))
    client.call(*directory.claim(digests_of(names(1))))
    client.call(*directory.claim_fill())
    keys = client.call("KEYS", "*")
    assert len(keys) == 5
    assert all(client.call("PTTL", key) > 0 for key in keys)
    assert client.call("PTTL", directory.name) < client.call("PTTL", f"{directory.name}:{generation(directory)}:0")


def generation(directory: Directory) -> str:
    return directory.fill(b"").decode()


@pytest.mark.parametrize(
    "damage", [{"slices": "99999999999"}, {"slices": "0"}, {"slices": "1.5"}, {"slices": "none"}, {"count": "none"}]
)
def test_a_directory_with_damaged_numbers_is_not_believed_and_begins_again(
    directory: Directory, client: ValkeyClient, damage: dict[str, str]
) -> None:
    held = digests_of(names(10))
    assert directory.finish(first := directory.fill(held))
    client.call("HSET", directory.name, *(part for item in damage.items() for part in item))
    if "slices" in damage:
        assert directory.answers(digests_of(names(1, "other"))) == (False, [False])
    assert directory.fill(held) != first
    assert directory.answers(held) == (False, [True] * 10)
    assert client.call("PTTL", directory.name) > 0


def test_a_directory_that_lost_a_slice_begins_again_with_keys_that_expire(
    directory: Directory, client: ValkeyClient
) -> None:
    first = directory.fill(digests_of(names(10)))
    client.call("DEL", f"{directory.name}:{first.decode()}:0")
    second = directory.fill(digests_of(names(10)))
    assert second != first
    assert directory.finish(second)
    assert directory.answers(digests_of(names(10))) == (True, [True] * 10)
    assert all(client.call("PTTL", key) > 0 for key in client.call("KEYS", "*"))


def test_a_claim_is_granted_to_one_machine_until_it_is_released(directory: Directory, client: ValkeyClient) -> None:
    other = Directory(client, b"bucket", "namespace/epoch/")
    assert client.call(*directory.claim(digests_of(["a", "b"]))) == b"11"
    assert client.call(*other.claim(digests_of(["b", "c"]))) == b"01"
    client.call(*directory.release(digests_of(["b"])))
    assert client.call(*other.claim(digests_of(["a", "b"]))) == b"01"


def test_a_machine_releases_no_claim_of_another_one(directory: Directory, client: ValkeyClient) -> None:
    other = Directory(client, b"bucket", "namespace/epoch/")
    assert client.call(*directory.claim(digests_of(["a", "b"]))) == b"11"
    lapsed = f"{directory.name}:lease:".encode() + digests_of(["a"])
    client.call("DEL", lapsed)
    assert client.call(*other.claim(digests_of(["a"]))) == b"1"
    client.call(*directory.release(digests_of(["a", "b"])))
    assert client.call(*directory.claim(digests_of(["a", "b"]))) == b"01"
    client.call(*other.release(digests_of(["a", "b"])))
    assert client.call(*other.claim(digests_of(["a", "b"]))) == b"10"


def test_the_release_of_a_claim_passes_over_strange_keys(directory: Directory, client: ValkeyClient) -> None:
    client.call(*directory.claim(digests_of(["b"])))
    client.call("RPUSH", f"{directory.name}:lease:".encode() + digests_of(["a"]), "strange")
    client.call(*directory.release(digests_of(["a", "b"])))
    assert client.call(*directory.claim(digests_of(["b"]))) == b"1"


def test_a_claim_without_an_end_gets_one_when_it_refuses_another(directory: Directory, client: ValkeyClient) -> None:
    other = Directory(client, b"bucket", "namespace/epoch/")
    digest = digests_of(["a"])
    client.call(*other.claim(digest))
    lease = f"{directory.name}:lease:".encode() + digest
    for end in (("PERSIST", lease), ("PEXPIRE", lease, 10**9)):
        client.call(*end)
        assert client.call(*directory.claim(digest)) == b"0"
        assert 0 < client.call("PTTL", lease) <= LEASE_MS
    client.call("PEXPIRE", lease, 5000)
    assert client.call(*directory.claim(digest)) == b"0"
    assert client.call("PTTL", lease) <= 5000


def test_a_touch_is_remembered_over_the_turn_of_the_hour(directory: Directory, client: ValkeyClient) -> None:
    assert client.call(*directory.touch(digests_of(["a", "b"]))) == b"00"
    assert client.call(*directory.touch(digests_of(["b", "c"]))) == b"10"
    (key,) = client.call("KEYS", "*:touch:*")
    name, _, hour = key.rpartition(b":")
    client.call("RENAME", key, name + b":" + str(int(hour) - 1).encode())
    assert client.call(*directory.touch(digests_of(["a", "d"]))) == b"10"


def test_media_and_epochs_have_directories_of_their_own(client: ValkeyClient) -> None:
    names = {
        Directory(client, medium, prefix).name
        for medium in (b"a", b"b")
        for prefix in ("namespace/one/", "namespace/two/")
    }
    assert len(names) == 4
