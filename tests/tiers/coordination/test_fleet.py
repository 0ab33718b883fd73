"""Machines that share a bucket and a server: what each spares the others, and what a wrong hint costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests.fake_s3 import Trouble
from tests.tiers import pool_machine
from tests.tiers.coordination.fleet import Fleet, find, medium_of, ready
from tests.tiers.machines import ROOT
from tiering import load_stack, open_manager
from tiering.index.shared import place_prefix
from tiering.testing.clock import FakeClock, until
from tiering.testing.tier_tests import K
from tiers.coordination import coordinated, coordination, directory, scope
from tiers.coordination.directory import Directory, digests_of
from tiers.coordination.scope import Claim
from tiers.object.bucket_options import S3Options
from tiers.valkey.client import ServerAddress, ValkeyClient

NEVER_VERIFY = ("tiers.coordination.coordination.VERIFIED_SHARE", 0.0)


@pytest.fixture(autouse=True)
def trust(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    """Verify no denial of a complete directory, so that requests can be counted."""
    monkeypatch.setattr(*NEVER_VERIFY)


def directory_of(fleet: Fleet, rig: object, client: ValkeyClient) -> Directory:
    """Return a machine's directory, as another machine sees it."""
    namespace = rig.tier.namespace  # type: ignore[attr-defined]
    return Directory(client, medium_of(fleet.bucket), place_prefix(namespace))


class TestGains:
    def test_blocks_that_several_machines_store_at_once_are_uploaded_once(
        self, fleet: Fleet, client: ValkeyClient
    ) -> None:
        one, two = fleet.machine(), fleet.machine()
        first, second = one.submit_store(K[:4]), two.submit_store(K[:4])
        results = [one.result(first), two.result(second)]
        assert fleet.uploads() == 4
        stored = [key for result in results for key in (K[:4] if result.success else result.successful_keys or ())]
        assert sorted(stored) == sorted(K[:4])
        assert one.tier.get_stats().stores_left + two.tier.get_stats().stores_left == 4
        for machine in (one, two):
            assert find(machine, K[:4], 4)
            assert machine.load(K[:4]) == K[:4]
        assert until(lambda: not client.call("KEYS", "*:lease:*"))

    def test_a_block_that_was_missed_is_found_as_soon_as_another_machine_has_stored_it(self, fleet: Fleet) -> None:
        one, two = fleet.machine(), fleet.machine()
        assert two.lookup(K[:4]) == 0
        one.store(K[:4])
        assert find(two, K[:4], 4)

    def test_new_blocks_cost_one_request_each(self, fleet: Fleet) -> None:
        one, two = fleet.machine(), fleet.machine()
        assert one.lookup(K[:4]) == two.lookup(K[:4]) == 0
        one.store(K[:4])
        assert find(two, K[:4], 4)
        assert (fleet.heads(), fleet.uploads()) == (0, 4)

    def test_a_declined_block_is_wanted_at_its_second_touch_on_any_machine(
        self, fleet: Fleet, client: ValkeyClient
    ) -> None:
        one, two = (fleet.machine(admission="second_touch") for _ in range(2))
        assert one.store(K[:4]) == []
        assert until(lambda: client.call("KEYS", "*:touch:*"))
        assert two.store(K[:4]) == []
        wanted: list[bytes] = []

        def all_wanted() -> bool:
            two.results += two.tier.get_finished()
            wanted.extend(two.step().wanted)
            return wanted == K[:4]

        assert until(all_wanted)
        assert not one.step().wanted
        assert two.store(K[:4]) == K[:4]

    def test_the_blocks_of_machines_without_coordination_are_found(self, fleet: Fleet) -> None:
        plain = fleet.machine(whole=False, coordination=None)
        plain.store(K[:4])
        assert find(fleet.machine(), K[:4], 4)
        assert fleet.heads() == 4, "only the plain machine's uploads looked first"


class TestWithoutAServer:
    def test_a_server_that_is_killed_is_done_without_until_it_is_back(self, own_fleet: Fleet) -> None:
        one, two = own_fleet.machine(), own_fleet.machine()
        one.store(K[:2])
        own_fleet.server.kill()
        assert two.lookup(K[:2]) == 2
        assert two.store(K[2:4]) == K[2:4]
        two.wait(lambda: not ready(two))
        own_fleet.server.restart()
        one.wait(lambda: ready(one))
        two.wait(lambda: ready(two))
        assert until(own_fleet.complete)
        assert one.lookup(K[2:4]) == 2, "the new directory has what was stored without the old one"

    @pytest.mark.parametrize("loss", ["flush", "restart"])
    def test_a_server_that_has_lost_its_scripts_is_not_gone(
        self, own_fleet: Fleet, loss: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = own_fleet.machine(), own_fleet.machine()
        one.store(K[:2])
        if loss == "restart":
            own_fleet.server.restart()
        else:
            server = ValkeyClient(ServerAddress.parse(own_fleet.server.url), connect_timeout=10.0, timeout=10.0)
            server.call("SCRIPT", "FLUSH")
            server.call("FLUSHALL")
            server.close()
        assert two.lookup(K[:2]) == 2
        assert two.store(K[2:4]) == K[2:4]
        assert find(one, K[2:4], 2)
        # A word that falls into the moment of the restart meets no server.
        one.wait(lambda: ready(one))
        two.wait(lambda: ready(two))
        assert "script" not in caplog.text
        assert loss == "restart" or "coordination is gone" not in caplog.text
        assert until(own_fleet.complete), "the empty directory is filled again"

    def test_a_server_that_is_away_at_the_start_is_done_without(self, own_fleet: Fleet) -> None:
        own_fleet.server.kill()
        one, two = (own_fleet.machine(whole=False) for _ in range(2))
        assert one.store(K[:4]) == K[:4]
        assert two.lookup(K[:4]) == 4

    def test_a_server_that_hangs_keeps_no_store_and_no_lookup(
        self, own_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordination, "TIMEOUT_SECONDS", 0.2)
        monkeypatch.setattr(coordinated, "CLAIM_SECONDS", 0.1)
        one, two = own_fleet.machine(), own_fleet.machine()
        with own_fleet.server.paused():
            assert one.store(K[:4]) == K[:4]
            assert two.lookup(K[:4]) == 4
            two.wait(lambda: not ready(two))
        two.wait(lambda: ready(two))

    def test_without_threads_the_tier_works_as_without_coordination(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if "-fleet-" in thread.name:
                raise RuntimeError("can't start new thread")
            plain(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        one = fleet.machine(whole=False)
        assert one.store(K[:4]) == K[:4]
        assert not ready(one)


class TestWrongHints:
    def test_an_emptied_directory_is_not_believed(self, fleet: Fleet, client: ValkeyClient) -> None:
        one, two = fleet.machine(), fleet.machine()
        one.store(K[:4])
        client.call("FLUSHALL")
        client.call("SCRIPT", "FLUSH")
        assert find(two, K[:4], 4)

    def test_a_directory_that_lost_a_part_is_not_believed(self, fleet: Fleet, client: ValkeyClient) -> None:
        one, two = fleet.machine(), fleet.machine()
        one.store(K[:4])
        assert until(lambda: all(directory_of(fleet, one, client).answers(places_of(one))[1]))
        (part,) = [name for name in client.call("KEYS", "kv-tiering:1:*:0") if b"lease" not in name]
        client.call("DEL", part)
        assert two.lookup(K[:4]) == 4

    def test_a_false_denial_that_is_verified_ends_the_trust(
        self, fleet: Fleet, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(coordination, "VERIFIED_SHARE", 1.0)
        monkeypatch.setattr(scope, "SETTLE_SECONDS", 0.0)
        one = fleet.machine()
        plain = fleet.machine(whole=False, coordination=None)
        plain.store(K[:4])
        assert one.lookup(K[:4]) > 0
        assert until(lambda: not fleet.complete())

    def test_a_block_that_is_uploaded_before_it_is_told_does_not_end_the_trust(
        self, fleet: Fleet, client: ValkeyClient
    ) -> None:
        shared = Directory(client, b"bucket", "namespace/epoch/")
        shared.finish(shared.fill(b""))
        clock = FakeClock()
        seen = scope.Scope(shared, lambda: None, lambda places: None, clock=clock)
        seen.suspect(["told", "never told"])
        seen.judge()
        assert len(seen.suspects) == 2
        shared.fill(digests_of(["told"]))
        clock.advance(scope.SETTLE_SECONDS)
        seen.suspects.pop()
        seen.judge()
        assert (len(seen.suspects), seen.overflowed) == (0, False)
        seen.suspect(["never told"])
        clock.advance(scope.SETTLE_SECONDS)
        seen.judge()
        assert (list(seen.queue.stored), seen.overflowed) == (["never told"], True)

    def test_blocks_that_the_directory_invents_are_misses_and_are_uploaded(
        self, fleet: Fleet, client: ValkeyClient
    ) -> None:
        one = fleet.machine()
        directory_of(fleet, one, client).fill(digests_of([*names_of(one)]))
        assert one.lookup(K[:4]) == 4
        assert one.load(K[:4]) == []
        assert one.store(K[:4]) == K[:4]
        assert fleet.uploads() == 4

    def test_notices_of_strangers_are_passed_over(self, fleet: Fleet, client: ValkeyClient) -> None:
        one, two = fleet.machine(), fleet.machine()
        assert two.lookup(K[:4]) == 0
        channel = directory_of(fleet, one, client).channel
        for content in (b"", b"x", bytes(16), bytes(16) + b"short", bytes(1000)):
            client.call("PUBLISH", channel, content)
        one.store(K[:4])
        assert find(two, K[:4], 4)

    def test_a_server_that_answers_nonsense_is_done_without(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = fleet.machine(), fleet.machine()
        one.store(K[:4])
        monkeypatch.setattr(Directory, "look", lambda self, digests: ("ECHO", "nonsense"))
        assert two.lookup(K[:4]) == 4

    def test_a_claim_of_a_machine_that_died_lapses(
        self, fleet: Fleet, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = fleet.machine()
        dead = directory_of(fleet, one, client)
        assert client.call(*dead.claim(digests_of(names_of(one)))) == b"1111"
        monkeypatch.setattr(directory, "LEASE_MS", 300)
        assert one.store(K[:4]) == [], "the refused claim shortens the other one"
        assert until(lambda: one.store(K[:4]) == K[:4])

    def test_another_bucket_and_another_epoch_have_directories_of_their_own(
        self, fleet: Fleet, client: ValkeyClient
    ) -> None:
        one, two = fleet.machine(), fleet.machine(prefix="staging")
        one.store(K[:2])
        assert two.store(K[:2]) == K[:2]
        three = fleet.machine()
        assert three.tier.reset(three.context.clock() + 10)
        assert three.lookup(K[:2]) == 0
        assert three.store(K[:2]) == K[:2]
        assert fleet.uploads() == 6

    def test_the_claims_of_blocks_that_are_dropped_are_not_kept(self, fleet: Fleet, client: ValkeyClient) -> None:
        """A block may be dropped before its claim is sent, or before the answer is processed."""
        shared = Directory(client, b"bucket", "namespace/epoch/")
        client.call_all(directory.load_scripts())
        seen = scope.Scope(shared, lambda: None, lambda places: None)
        unsent, sent = Claim(["a", "b"]), Claim(["c", "d"])
        unsent.dropped.update(["a", "b"])
        seen.queue.claims.append(unsent)
        seen.send(client)
        assert not seen.queue.waiting()
        sent.dropped.add("c")
        seen.queue.claims.append(sent)
        seen.send(client)
        assert (unsent.granted, sent.granted) == (None, [True, True])
        assert len(client.call("KEYS", "*:lease:*")) == 2
        while seen.queue.waiting():
            seen.send(client)
        (lease,) = client.call("KEYS", "*:lease:*")
        assert lease.endswith(digests_of(["d"]))

    def test_a_machine_that_leaves_its_epoch_gives_its_claims_back(self, fleet: Fleet, client: ValkeyClient) -> None:
        one, two = fleet.machine(), fleet.machine()
        fleet.bucket.fail(Trouble.HANG, method="PUT", part="/blocks/", times=4)
        one.submit_store(K[:4])
        one.wait(lambda: fleet.uploads() == 4)
        fleet.bucket.heal()
        assert len(client.call("KEYS", "*:lease:*")) == 4
        one.tier.reset(one.context.clock())
        assert until(lambda: not client.call("KEYS", "*:lease:*"))
        assert two.store(K[:4]) == K[:4]
        fleet.bucket.closing.set()

    def test_blocks_of_a_machine_that_is_killed_while_it_uploads_are_uploaded_by_one_that_has_them(
        self, fleet: Fleet, client: ValkeyClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other engine was refused, and offers the blocks again although no request uses them."""
        tier = {
            "type": "s3",
            "bucket": fleet.bucket.bucket,
            "endpoint_url": fleet.bucket.endpoint,
            "prefix": "prod",
            "coordination": fleet.server.url,
        }
        stack = {"primary": {"capacity": "8MiB"}, "secondary": [tier]}
        path = tmp_path / "stack.yaml"
        path.write_text(yaml.safe_dump(stack))
        fleet.bucket.fail(Trouble.HANG, method="PUT", part="/blocks/", times=4)
        command = [sys.executable, "-m", "tests.tiers.pool_machine", str(path), "store", "4"]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert until(lambda: fleet.uploads() == 4, timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert len(client.call("KEYS", "*:lease:*")) == 4
        monkeypatch.setattr(directory, "LEASE_MS", 500)
        with open_manager(load_stack(stack), pool_machine.BLOCK_BYTES, pool_machine.MODEL) as manager:

            def stat(name: str) -> int:
                manager.on_schedule_end()
                (stats,) = manager.get_stats()["tiers"].values()
                return int(stats[name])

            assert until(lambda: stat("coordinated") == 1)
            pool_machine.store(manager, 4)
            assert stat("stores_left") == 4
            assert until(lambda: stat("cascades") == 4)
        assert len(set(fleet.bucket.objects)) >= 4
        assert fleet.uploads() == 8

    def test_a_failed_upload_gives_its_claim_back(self, fleet: Fleet, client: ValkeyClient) -> None:
        one, two = fleet.machine(retries={"attempts": 1}), fleet.machine()
        fleet.bucket.fail(500, method="PUT", part="/blocks/")
        assert one.store(K[:1]) == []
        assert until(lambda: not client.call("KEYS", "*:lease:*"))
        assert two.store(K[:1]) == K[:1]


def names_of(rig: object) -> list[str]:
    """Return the places of the first four blocks on a machine."""
    return [str(place) for place in rig.tier.index.begin_load(K[:4])]  # type: ignore[attr-defined]


def places_of(rig: object) -> bytes:
    """Return the digests of the first four blocks on a machine."""
    return digests_of(names_of(rig))


def test_the_address_must_be_one_of_a_server() -> None:
    with pytest.raises(ValueError, match="none of the schemes"):
        S3Options.model_validate({"bucket": "kv-cache", "coordination": "http://host"})
    assert ServerAddress.parse("valkey://host").port == 6379
