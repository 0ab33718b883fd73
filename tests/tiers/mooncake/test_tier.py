"""The Mooncake tier in trouble: lost owners, killed and hung masters, a full pool, damaged values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.mooncake_pool import Master, Owner, serving
from tests.cli.runner import kv_tiering
from tests.patience import PATIENT
from tests.tiers.machines import machine
from tests.tiers.mooncake.pool import Raw
from tiering.api.namespace import FORMAT_VERSION
from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError
from tiering.index.shared import object_name, place_prefix
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.mooncake import MOONCAKE_TIER, MooncakeOptions

BLOCK = 64 << 10
Make = Callable[..., TierRig]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that opens a tier on a pool, closed after the test."""
    rigs: list[TierRig] = []

    def build(master: Master, *, revision: str | None = "1", size: int = BLOCK, **words: object) -> TierRig:
        quick = {
            "absent_ttl": 0.02,
            "present_ttl": 0.02,
            **PATIENT,
            "breaker": {"failures": 3, "probe_after": 0.05},
        }
        options = MooncakeOptions.model_validate({"master": master.address, **quick, **words})
        rig = TierRig(lambda context: MOONCAKE_TIER.build(options, context), group_bytes=(size,), revision=revision)
        rigs.append(rig)
        return rig.open()

    yield build
    for rig in rigs:
        rig.close()


def test_a_lost_owner_costs_misses_and_the_next_one_takes_blocks(own_pool: tuple[Master, Owner], make: Make) -> None:
    master, owner = own_pool
    rig = make(master)
    rig.store(K[:4])
    owner.kill()
    assert rig.load(K[:4]) == []
    assert rig.tier.get_stats().corrupt_blocks == 0
    other = Owner(master)
    try:
        rig.wait(lambda: rig.store(K[:4]) == K[:4])
        rig.wait(lambda: rig.load(K[:4]) == K[:4])
    finally:
        rig.close()
        other.kill()


def test_a_killed_master_costs_misses_and_a_new_one_is_used_without_a_restart(
    own_pool: tuple[Master, Owner], make: Make
) -> None:
    master, _ = own_pool
    rig = make(master, segment_size="64MiB")
    rig.store(K[:4])
    master.kill()
    assert rig.load(K[:4]) == []
    rig.wait(lambda: rig.tier.get_stats().available == 0)
    assert rig.lookup(K[:4]) == 0
    master.start_again()
    rig.wait(lambda: rig.store(K[:4]) == K[:4])
    rig.wait(lambda: rig.load(K[:4]) == K[:4])


def test_a_hung_master_fails_loads_and_nothing_is_written_to_their_rows_later(
    own_pool: tuple[Master, Owner], make: Make
) -> None:
    master, _ = own_pool
    rig = make(master, retries={"attempts": 1})
    rig.store(K[:4])
    with master.paused():
        assert rig.load(K[:4], first_row=40) == []
        rig.rows[40:44] = 0x11
    rig.wait(lambda: rig.load(K[:4], first_row=50) == K[:4])
    assert (rig.rows[40:44] == 0x11).all()


def test_a_hung_owner_fails_loads_and_holds_their_rows_until_the_transfer_has_ended(
    own_pool: tuple[Master, Owner], make: Make
) -> None:
    master, owner = own_pool
    rig = make(master, retries={"attempts": 1})
    rig.store(K[:4])
    with owner.paused():
        assert rig.load(K[:4], first_row=40) == []
        rig.rows[40:44] = 0x11
    # The master may have forgotten the owner meanwhile, and with it the blocks.
    rig.wait(lambda: rig.store(K[:4]) == K[:4] and rig.load(K[:4], first_row=50) == K[:4])
    assert (rig.rows[40:44] == 0x11).all()


def test_a_hung_master_does_not_hold_up_the_end(own_pool: tuple[Master, Owner], make: Make) -> None:
    master, _ = own_pool
    rig = make(master)
    rig.store(K[:4])
    with master.paused():
        rig.submit_load(K[:4])
        assert not rig.tier.shutdown(time.monotonic() + 0.2), "rows of loads that have not ended stay in use"
    rig.wait(lambda: rig.tier.shutdown(time.monotonic() + 20))


def test_a_block_without_room_in_the_pool_is_not_stored_and_others_are(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("16 MB") as (master, _):
        small, large = make(master), make(master, size=17 << 20, retries={"attempts": 1})
        assert large.store(K[:1]) == []
        assert "the pool has no room" in caplog.text
        assert small.store(K[:2]) == K[:2]
        assert small.load(K[:2]) == K[:2]
        assert large.tier.get_stats().available == 1
        small.close()
        large.close()


def test_failures_of_the_pool_are_not_written_to_standard_error_by_the_client(
    own_pool: tuple[Master, Owner], make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    master, owner = own_pool
    rig = make(master)
    rig.store(K[:4])
    owner.kill()
    assert rig.load(K[:4]) == []
    assert "transfer" not in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["version", "payload", "length", "page"])
def test_damaged_and_foreign_values_are_misses(pool: Master, raw: Raw, make: Make, damage: str) -> None:
    rig = make(pool, prefix=f"damaged-{damage}")
    rig.store(K[:2])
    assert rig.context.revision is not None
    space = rig.context.namespace.revision_epoch(rig.context.revision)
    name = f"damaged-{damage}/{object_name(place_prefix(space), K[0])}"
    frame = bytearray(raw.read(name) or b"")
    assert len(frame) == 128 + BLOCK
    if damage == "version":
        frame[8:10] = (FORMAT_VERSION + 1).to_bytes(2, "little")
    elif damage == "payload":
        frame[5000] ^= 1
    elif damage == "length":
        frame += b"more"
    else:
        frame[:] = b"<html>please log in</html>"
    raw.write(name, bytes(frame))
    assert rig.load(K[:1]) == []
    assert rig.load(K[1:2]) == K[1:2]
    assert rig.tier.get_stats().corrupt_blocks == 1
    assert raw.read(name) == bytes(frame), "nothing shared is removed on one machine's word"


def test_two_machines_load_each_others_blocks_from_each_others_memory(tmp_path: Path) -> None:
    master = Master()
    try:
        tier = {"type": "mooncake", "master": master.address, "segment_size": "32MiB"}
        with machine(tmp_path / "one.yaml", tier, "store", 24, revision="1") as stored:
            assert stored == 24
            with machine(tmp_path / "two.yaml", tier, "load", 32, revision="1") as loaded:
                assert loaded == 24
    finally:
        master.kill()


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("word", ["capacity", "high_watermark", "low_watermark", "eviction", "ttl", "compression"])
def test_words_that_the_pool_decides_are_refused_with_the_reason(word: str) -> None:
    values = {"compression": "zstd", "ttl": "1d", "eviction": "arc", "capacity": "1GiB"}
    with pytest.raises(ValueError, match=f"{word} is not supported by this tier: "):
        MooncakeOptions.model_validate({"master": "pool:50051", word: values.get(word, 0.5)})


@pytest.mark.parametrize(
    "words",
    [{"master": "pool"}, {"master": "pool:a"}, {"segment_size": "1MiB"}, {"metadata": "pool"}, {"replicas": 0}],
)
def test_wrong_words_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(words))):
        MooncakeOptions.model_validate({"master": "pool:50051"} | words)


def test_a_stack_without_a_revision_is_refused_with_the_remedy_by_engines_and_by_check(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("primary: {capacity: 8MiB}\nsecondary: [{type: mooncake, master: 'pool:50051'}]\n")
    problem = (
        "revision: is missing, and secondary[0] (mooncake) needs it: the pool keeps no documents, so the stack must "
        "name the weights itself; set revision, and another one after each change of the weights"
    )
    with pytest.raises(ConfigError) as raised:
        load_stack(stack)
    assert str(raised.value) == f"{stack}: {problem}"
    done = kv_tiering("check", stack)
    assert (done.code, done.out, done.err) == (2, "", f"kv-tiering: {stack}: {problem}\n")


def test_check_finds_a_pool_in_order_and_names_a_master_that_is_not_there(pool: Master, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(
        f"primary: {{capacity: 8MiB}}\nrevision: '1'\nsecondary: [{{type: mooncake, master: '{pool.address}'}}]\n"
    )
    done = kv_tiering("check", stack, "--tier", "mooncake", "--block-bytes", BLOCK)
    assert (done.code, "identical" in done.out) == (0, True), done.out
    stack.write_text(stack.read_text().replace(pool.address, "127.0.0.1:1"))
    done = kv_tiering("check", stack, "--tier", "mooncake", "--block-bytes", BLOCK)
    assert (done.code, "cannot be reached" in done.out) == (1, True), done.out
    done = kv_tiering("inspect", stack)
    assert "cannot list its blocks" in done.err
