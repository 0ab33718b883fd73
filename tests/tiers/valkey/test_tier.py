"""The Valkey tier in trouble: restarts, hangs, full or read-only servers, damaged values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import valkey

from examples.valkey_server import ValkeyServer, serving
from tests.patience import PATIENT
from tests.tiers.valkey.relay import Relay
from tiering.api.namespace import FORMAT_VERSION
from tiering.block_tier.epoch_chores import LOOK_SECONDS
from tiering.epochs.driver import SURE_SECONDS
from tiering.errors import ConfigError, CorruptBlockError
from tiering.medium.block_store import Done
from tiering.secondary.contract import TierContext
from tiering.testing.clock import FakeClock
from tiering.testing.frames import block_to_get, block_to_put, frame_bytes
from tiering.testing.tier_rig import TierRig, make_namespace
from tiering.testing.tier_tests import K
from tiers.valkey.tier import VALKEY_TIER, ValkeyOptions, ValkeyStore

BLOCK = 64 << 10
Make = Callable[..., TierRig]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that opens a tier with small timeouts on a server, closed after the test."""
    rigs: list[TierRig] = []

    def build(server: ValkeyServer | str, *, opened: bool = True, model: str = "model-a", **words: object) -> TierRig:
        quick = {
            "absent_ttl": 0.02,
            "present_ttl": 0.02,
            **PATIENT,
            "breaker": {"failures": 3, "probe_after": 0.05},
        }
        url = server if isinstance(server, str) else server.url
        options = ValkeyOptions.model_validate({"url": url, **quick, **words})
        rig = TierRig(lambda context: VALKEY_TIER.build(options, context), group_bytes=(BLOCK,), model=model)
        rigs.append(rig)
        return rig.open() if opened else rig

    yield build
    for rig in rigs:
        rig.close()


def blocks_on(server: ValkeyServer) -> list[bytes]:
    with valkey.Valkey(port=server.port) as raw:
        return sorted(raw.keys("*/blocks/*"))


def lines(caplog: pytest.LogCaptureFixture, part: str) -> int:
    return sum(part in record.getMessage() for record in caplog.records)


# --------------------------------------------------------------------------------------------------------------- values


def test_blocks_expire_and_documents_do_not(own_server: ValkeyServer, make: Make) -> None:
    make(own_server, ttl="5m").store(K[:2])
    with valkey.Valkey(port=own_server.port) as raw:
        left = [raw.pttl(name) for name in blocks_on(own_server)]
        assert len(left) == 2
        assert all(0 < milliseconds <= 300_000 for milliseconds in left)
        assert raw.ttl("kv-tiering/documents") == -1


def test_a_lease_expires_unless_it_is_renewed(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server)
    assert rig.tier.reset(time.monotonic() + 20)
    rig.tier.on_schedule_end()
    with valkey.Valkey(port=own_server.port) as raw:
        rig.wait(lambda: bool(raw.keys("kv-tiering/leases/*")))
        (lease,) = raw.keys("kv-tiering/leases/*")
        assert 80_000 < raw.ttl(lease) <= 86_400


@pytest.mark.parametrize(("kind", "most"), [("hot-", 600), ("speeds-", 30 * 86_400)])
def test_hints_expire_and_are_listed_and_read_like_documents(own_server: ValkeyServer, kind: str, most: int) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    name = f"{kind}a"
    try:
        assert store.read_document(name) is None
        store.write_document(name, b"keys")
        assert store.read_document(name) == b"keys"
        assert (list(store.list_documents(kind)), list(store.list_documents("epoch-"))) == ([name], [])
        with valkey.Valkey(port=own_server.port) as raw:
            assert most - 60 < raw.ttl(f"kv-tiering/leases/{name}") <= most
            assert not raw.exists("kv-tiering/documents")
        store.remove_document(name)
        assert store.read_document(name) is None
    finally:
        store.close()


def test_a_block_that_is_there_is_not_sent_again(own_server: ValkeyServer) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    try:
        first = block_to_put(store, "a", BLOCK, version=1)
        store.put_one(first)
        with valkey.Valkey(port=own_server.port) as raw:
            before = raw.info("stats")["total_net_input_bytes"]
            store.put_one(block_to_put(store, "a", BLOCK, version=2))
            assert raw.info("stats")["total_net_input_bytes"] - before < BLOCK // 2
        got = block_to_get(store, "a", BLOCK)
        assert store.get_one(got) is Done.DONE
        assert frame_bytes(got) == frame_bytes(first)
    finally:
        store.close()


@pytest.mark.parametrize("length", [0, 5, 127, 128 + BLOCK + 1, 4 * BLOCK])
def test_a_value_of_another_length_is_refused(own_server: ValkeyServer, length: int) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    try:
        store.client.call("SET", store.name("a"), bytes(length))
        with pytest.raises(CorruptBlockError, match="bytes"):
            store.get_one(block_to_get(store, "a", BLOCK))
    finally:
        store.close()


def test_prefixes_keep_stacks_apart(own_server: ValkeyServer, make: Make) -> None:
    one, other = make(own_server, prefix="a"), make(own_server, prefix="a/b")
    one.store(K[:2])
    assert other.lookup(K[:2]) == 0
    assert one.lookup(K[:2]) == 2


# -------------------------------------------------------------------------------------------------- damaged and foreign


def test_blocks_of_another_version_are_misses(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server)
    rig.store(K[:1])
    (name,) = blocks_on(own_server)
    with valkey.Valkey(port=own_server.port) as raw:
        raw.setrange(name, 8, (FORMAT_VERSION + 1).to_bytes(2, "little"))
    assert rig.load(K[:1]) == []
    assert rig.tier.get_stats().corrupt_blocks == 1


def test_a_damaged_block_is_removed_only_as_the_version_that_was_read(own_server: ValkeyServer) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    name = store.name("a")
    try:
        store.client.call("SET", name, b"bad")
        found = store.read_again("a", 100)
        assert found is not None
        assert (found.content, found.size) == (b"bad", 3)
        store.client.call("SET", name, b"new")
        assert not store.delete_version("a", found.version)
        assert store.client.call("GET", name) == b"new"
        store.client.call("SET", name, b"bad")
        assert store.delete_version("a", found.version)
        assert store.client.call("EXISTS", name) == 0
        assert not store.delete_version("a", found.version)
        assert store.read_again("a", 100) is None
    finally:
        store.close()


def test_a_value_that_changes_during_the_removal_stays(own_server: ValkeyServer) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    try:
        store.client.call("SET", "key", b"bad")

        def look(size: int, content: bytes) -> bool:
            store.client.call("SET", "key", b"good")
            return content == b"bad"

        assert not store.client.unlink_if("key", 10, look)
        assert store.client.call("GET", "key") == b"good"
    finally:
        store.close()


def test_a_long_value_is_told_by_its_length_and_removed_by_its_version(own_server: ValkeyServer) -> None:
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    try:
        store.client.call("SET", store.name("a"), bytes(1000))
        found = store.read_again("a", 100)
        assert found is not None
        assert (found.content, found.size) == (b"", 1000)
        assert store.delete_version("a", found.version)
    finally:
        store.close()


# -------------------------------------------------------------------------------------------------------------- outages


def test_a_restarted_server_is_empty_and_used_again(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server)
    rig.store(K[:4])
    own_server.restart()
    rig.wait(lambda: rig.load(K[:4]) == [])
    rig.wait(lambda: rig.store(K[:4]) == K[:4])
    assert rig.load(K[:4]) == K[:4]


def test_a_killed_server_costs_misses_and_no_error_of_the_engine(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server)
    rig.store(K[:4])
    own_server.kill()
    assert rig.load(K[:4]) == []
    assert rig.store(K[4:6]) == []
    rig.wait(lambda: rig.tier.get_stats().available == 0)
    assert rig.lookup(K[:4]) == 0


def test_a_tier_whose_server_comes_later_comes_into_service(own_server: ValkeyServer, make: Make) -> None:
    own_server.kill()
    rig = make(own_server, opened=False)
    assert not rig.tier.open(time.monotonic() + 20)
    assert str(own_server.port) in str(rig.tier.open_error)
    own_server.restart()
    rig.wait(lambda: rig.store(K[:1]) == K[:1])


def test_a_hung_server_fails_loads_and_writes_no_row_afterwards(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server, request_timeout=1.0, retries={"attempts": 1})
    rig.wait(lambda: rig.store(K[:4]) == K[:4])
    with own_server.paused():
        assert rig.load(K[:4], first_row=40) == []
        rig.rows[40:44] = 0x11
        assert rig.lookup(K[:1]) == 0
    rig.wait(lambda: rig.load(K[:4], first_row=50) == K[:4])
    assert (rig.rows[40:44] == 0x11).all()


def test_a_hung_server_does_not_hold_up_the_end(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server, request_timeout=30.0)
    rig.store(K[:4])
    with own_server.paused():
        rig.submit_load(K[:4])
        assert not rig.tier.shutdown(time.monotonic() + 0.3), "rows of loads that have not ended stay in use"
    rig.wait(lambda: rig.tier.shutdown(time.monotonic() + 20))


def test_a_connection_cut_within_a_value_is_a_miss_and_a_retry_reads_it(own_server: ValkeyServer, make: Make) -> None:
    with Relay(own_server.port) as relay:
        rig = make(f"valkey://127.0.0.1:{relay.port}", retries={"attempts": 1})
        rig.store(K[:1])
        relay.cut_answers_after = BLOCK // 2
        assert rig.load(K[:1]) == []
        relay.cut_answers_after = None
        rig.wait(lambda: rig.load(K[:1]) == K[:1])
        assert rig.tier.get_stats().corrupt_blocks == 0
        rig.close()


# -------------------------------------------------------------------------------------------------------- full, refused


def test_a_full_server_takes_no_stores_and_serves_what_it_holds(make: Make) -> None:
    with serving({"maxmemory": "2mb", "maxmemory-policy": "noeviction"}) as full:
        rig = make(full, retries={"attempts": 1}, breaker={"failures": 1000})
        for key in K:
            if rig.store([key]) == []:
                break
        held = len(blocks_on(full))
        assert 4 <= held < len(K)
        assert rig.load(K[:4]) == K[:4]
        assert rig.tier.get_stats().available == 1
        rig.close()


def test_a_server_that_evicts_keeps_the_documents_and_serves_the_blocks_that_are_left(make: Make) -> None:
    with serving({"maxmemory": "2mb", "maxmemory-policy": "volatile-lru"}) as small:
        rig = make(small)
        for _ in range(4):
            for key in K:
                rig.wait(lambda key=key: rig.store([key]) == [key])  # type: ignore[misc]
        # The server's clock of uses has seconds, so blocks of one second are evicted in any order.
        left = [key for key in K if rig.load([key]) == [key]]
        assert 0 < len(left) < len(K)
        other = make(small)
        other.wait(lambda: any(other.lookup([key]) == 1 for key in left))
        rig.close()
        other.close()


def test_a_replica_serves_and_takes_no_stores(own_server: ValkeyServer, make: Make) -> None:
    rig = make(own_server, retries={"attempts": 1})
    rig.store(K[:2])
    with serving() as primary, valkey.Valkey(port=own_server.port) as raw:
        raw.config_set("replica-serve-stale-data", "yes")
        raw.config_set("repl-diskless-load", "on-empty-db")
        raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert rig.store(K[2:3]) == []
        assert rig.load(K[:2]) == K[:2]
        assert primary.process.poll() is None


def test_a_wrong_password_keeps_the_tier_out_of_service_and_is_not_shown(
    own_server: ValkeyServer, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with valkey.Valkey(port=own_server.port) as raw:
        raw.config_set("requirepass", "swordfish")
    monkeypatch.setenv("VALKEY_PASSWORD", "hunter22")
    rig = make(own_server, opened=False)
    assert not rig.tier.open(time.monotonic() + 20)
    assert "wrong user or password" in str(rig.tier.open_error)
    assert "hunter22" not in f"{rig.tier.open_error} {caplog.text} {rig.tier}"
    monkeypatch.setenv("VALKEY_PASSWORD", "swordfish")
    rig.wait(lambda: rig.store(K[:1]) == K[:1])


# --------------------------------------------------------------------------------------------------------------- epochs


def timed(server: ValkeyServer, clock: FakeClock) -> TierRig:
    """Return an open tier on a clock of the test."""

    def build(context: TierContext) -> object:
        own = TierContext(context.name, context.primary_view, context.group_bytes, context.namespace, clock=clock)
        return VALKEY_TIER.build(ValkeyOptions(url=server.url), own)

    rig = TierRig(build, group_bytes=(BLOCK,))  # type: ignore[arg-type]
    assert rig.tier.open(clock() + 20)
    return rig


def test_engines_that_start_after_a_restart_of_the_server_share_with_those_that_run(
    own_server: ValkeyServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    rig = timed(own_server, clock)
    watch = rig.tier._life._watch  # type: ignore[attr-defined]
    store = ValkeyStore(ValkeyOptions(url=own_server.url))
    try:
        before = {name: store.read_document(name) for name in store.list_documents("")}
        assert len(before) == 2
        for times in (1, 2):
            own_server.restart()
            clock.advance(LOOK_SECONDS)

            def restored() -> bool:
                # A look over a connection that has broken is tried again. While a look runs, no time may pass: a loss
                # that was not seen for a minute counts as a new epoch.
                if not watch.running:
                    clock.advance(1.0)
                return len(list(store.list_documents(""))) == 2

            rig.wait(restored)
            assert {name: store.read_document(name) for name in store.list_documents("")} == before
            assert lines(caplog, "they are written again") == times
            assert not rig.step().superseded
        # The parameters are written last.
        assert make(own_server).tier.get_stats().available == 1
    finally:
        store.close()
        rig.tier.shutdown(clock() + 20)


def test_a_restart_after_a_time_in_which_nothing_was_seen_counts_as_a_new_epoch(own_server: ValkeyServer) -> None:
    clock = FakeClock()
    rig = timed(own_server, clock)
    try:
        clock.advance(LOOK_SECONDS + SURE_SECONDS)
        own_server.restart()
        rig.tier.on_schedule_end()
        rig.wait(lambda: rig.step().superseded)
        rig.tier.reset(clock(), follow=True)
        assert rig.tier.get_stats().available == 1
    finally:
        rig.tier.shutdown(clock() + 20)


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "word", ["capacity", "high_watermark", "low_watermark", "eviction", "compression", "password", "username"]
)
def test_words_that_the_server_decides_are_refused_with_the_reason(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} is not supported by this tier: "):
        ValkeyOptions.model_validate({"url": "valkey://cache", word: "zstd" if word == "compression" else "1GiB"})


def test_a_stack_with_a_password_in_the_address_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="VALKEY_PASSWORD") as refused:
        ValkeyOptions(url="valkey://me:hunter22@cache")
    assert "hunter22" not in str(refused.value)


def test_blocks_that_no_value_holds_are_refused(own_server: ValkeyServer) -> None:
    context = TierContext("pool", memoryview(b""), (512 << 20,), make_namespace("m", (512 << 20,)))
    with pytest.raises(ConfigError, match="block_size"):
        VALKEY_TIER.build(ValkeyOptions(url=own_server.url), context)
