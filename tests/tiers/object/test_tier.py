"""The object store as a tier: outages, faults in the middle of jobs, compression, accounting."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from tests.fake_s3 import FakeS3, Trouble
from tests.tiers.object.rigs import BLOCK_BYTES, Make, block_names, lines, tier_of
from tiering.api.keys import OffloadKey
from tiering.api.namespace import KVLayout, ModelIdentity, Namespace
from tiering.testing.keys import keys_of
from tiering.testing.tier_rig import PATIENCE_SECONDS, TierRig
from tiering.testing.tier_tests import K
from tiers.object.definition import MISSES_IN_A_ROW, ObjectTier, element_size


class Bfloat16Rig(TierRig):
    """Blocks with the statistics of a KV cache in bf16."""

    def content(self, key: OffloadKey) -> bytes:
        rng = np.random.default_rng(int.from_bytes(key[:7], "big"))
        numbers = rng.standard_normal(self.size(key) // 2, np.float32).view(np.uint32) >> 16
        return numbers.astype(np.uint16).tobytes()


def open_tier(rig: TierRig, patience: float = 5.0) -> bool:
    return rig.tier.open(time.monotonic() + patience)


class TestOutages:
    @pytest.mark.parametrize(("status", "word"), [(403, "credentials"), (404, "no such bucket"), (503, "503")])
    def test_what_is_wrong_at_start_is_said_once_and_the_tier_comes_back(
        self, fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, status: int, word: str
    ) -> None:
        fake.fail(status, times=1 << 30)
        rig = make()
        assert not open_tier(rig)
        assert rig.lookup(K[:1]) == 0
        assert rig.store(K[:1]) == []
        asked = len(fake.seen)
        rig.wait(lambda: len(fake.seen) >= asked + 3)
        (line,) = lines(caplog, "not in service")
        assert word in line
        fake.heal()
        rig.wait(lambda: rig.tier.get_stats().available)
        assert rig.store(K[:2]) == K[:2]
        assert rig.load(K[:2]) == K[:2]

    def test_an_endpoint_that_does_not_answer_delays_the_start_no_longer_than_its_deadline(
        self, fake: FakeS3, make: Make
    ) -> None:
        fake.fail(Trouble.HANG, times=1 << 30)
        rig = make(deadline="1h", request_timeout="1h")
        assert not open_tier(rig, 0.1)
        assert tier_of(rig).failed_attempts == 0, "the attempt goes on"
        assert fake.hanging.acquire(timeout=PATIENCE_SECONDS)
        fake.closing.set()

    @pytest.mark.parametrize("trouble", [500, 503, 429, Trouble.RESET])
    def test_what_passes_is_tried_again_within_the_job(self, fake: FakeS3, make: Make, trouble: int | Trouble) -> None:
        rig = make().open()
        fake.fail(trouble, method="PUT", part="blocks/")
        assert rig.store(K[:3]) == K[:3]
        fake.fail(trouble, method="GET", part="blocks/")
        assert rig.load(K[:3]) == K[:3]
        assert rig.tier.get_stats().retries >= 2

    def test_a_body_cut_short_is_tried_again(self, fake: FakeS3, make: Make) -> None:
        rig = make().open()
        rig.store(K[:1])
        fake.fail(Trouble.CUT_BODY, method="GET", part="blocks/")
        assert rig.load(K[:1]) == K[:1]

    def test_an_outage_is_a_miss_and_ends(self, fake: FakeS3, make: Make) -> None:
        rig = make(max_inflight=1).open()
        rig.store(K[:4])
        fake.fail(503, times=1 << 30)
        assert rig.load(K[:4]) == []
        rig.wait(lambda: rig.tier.get_stats().breaker_state != 0)
        assert rig.lookup(K[:4]) == 0
        fake.heal()
        rig.wait(lambda: rig.tier.get_stats().breaker_state == 0)
        assert rig.load(K[:4]) == K[:4]

    def test_a_hang_fails_the_job_when_its_deadline_has_passed(self, fake: FakeS3, make: Make) -> None:
        rig = make(deadline="300ms").open()
        rig.store(K[:1])
        fake.fail(Trouble.HANG, method="GET", part="blocks/", times=1 << 30)
        assert rig.load(K[:1]) == []

    def test_a_broken_block_is_removed_by_one_request(self, fake: FakeS3, make: Make) -> None:
        """A second request could delete the good block that was stored in its place."""
        rig = make(bulk_delete=False).open()
        rig.store(K[:1])
        (name,) = [name for name in fake.objects if "/blocks/" in name]
        fake.objects[name] = fake.objects[name][:-1] + bytes([fake.objects[name][-1] ^ 1])
        assert rig.load(K[:1]) == []
        rig.wait(lambda: name not in fake.objects)
        assert rig.close()
        assert len(fake.asked("DELETE") + fake.asked("POST")) == 1


class TestSharing:
    def test_a_block_another_engine_has_stored_is_not_uploaded_again(self, fake: FakeS3, make: Make) -> None:
        one, two = make().open(), make().open()
        one.store(K[:3])
        before = len(fake.asked("PUT", "blocks/"))
        assert two.store(K[:4]) == K[:4]
        assert len(fake.asked("PUT", "blocks/")) == before + 1

    def test_a_prefix_is_asked_about_in_few_requests(self, fake: FakeS3, make: Make) -> None:
        make().open().store(K[:20])
        two = make().open()
        before = len(fake.asked("HEAD"))
        assert two.lookup(K) == 20
        assert len(fake.asked("HEAD")) - before < 20


class TestCompression:
    def test_round_trip_and_smaller_objects(self, fake: FakeS3, make: Make) -> None:
        rig = make(Bfloat16Rig, compression="zstd").open()
        assert rig.store(K[:8]) == K[:8]
        sizes = [len(data) for name, data in fake.objects.items() if "/blocks/" in name]
        assert len(sizes) == 8
        assert max(sizes) < 0.8 * BLOCK_BYTES
        assert rig.load(K[:8]) == K[:8]

    def test_what_does_not_shrink_is_stored_as_it_is(self, fake: FakeS3, make: Make) -> None:
        rig = make(compression="zstd").open()
        rig.store(K[:1])
        assert [len(data) for name, data in fake.objects.items() if "/blocks/" in name] == [BLOCK_BYTES + 128]
        assert rig.load(K[:1]) == K[:1]

    def test_is_read_by_an_engine_that_does_not_compress(self, make: Make) -> None:
        make(Bfloat16Rig, compression="zstd").open().store(K[:2])
        assert make(Bfloat16Rig).open().load(K[:2]) == K[:2]

    @pytest.mark.parametrize(
        ("kv_dtype", "size"), [("bfloat16", 2), ("float16", 2), ("fp8_e4m3", 1), ("int8", 1), ("float32", 4)]
    )
    def test_splits_by_the_size_of_a_number(self, kv_dtype: str, size: int) -> None:
        layout = KVLayout(
            kv_dtype=kv_dtype,
            layer_names=("a",),
            groups=("full",),
            gpu_block_size=(16,),
            block_size_factor=1,
            group_bytes=(1024,),
            memory_order="NHD",
            parallel_sizes=(),
            hash_algorithm="sha256",
            hash_seed="0",
            hash_block_size=16,
        )
        model = ModelIdentity(name="m", weights="w", dtype="bfloat16", layout=layout)
        assert element_size(Namespace.build(model, (1024,))) == size
        other = ModelIdentity(name="m", weights="w", dtype=kv_dtype, layout="mine")
        assert element_size(Namespace.build(other, (1024,))) == size


REMEMBERING: dict[str, object] = {"absent_ttl": "60s"}
"""Options with which a miss is remembered until the store that follows."""


class TestLooksBeforePuts:
    def test_blocks_that_a_lookup_missed_are_put_without_a_look(self, fake: FakeS3, make: Make) -> None:
        rig = make(**REMEMBERING).open()
        assert rig.lookup(K[:4]) == 0
        looks = len(fake.asked("HEAD"))
        assert rig.store(K[:4]) == K[:4]
        assert len(fake.asked("HEAD")) == looks
        assert rig.store(K[8:10]) == K[8:10]
        assert len(fake.asked("HEAD")) == looks + 2
        assert rig.load(K[:4]) == K[:4]

    def test_a_block_that_another_engine_has_put_meanwhile_is_not_replaced(self, fake: FakeS3, make: Make) -> None:
        first, second = make(**REMEMBERING).open(), make(**REMEMBERING).open()
        assert first.lookup(K[:2]) == second.lookup(K[:2]) == 0
        assert first.store(K[:2]) == K[:2]
        stored = {name: fake.objects[name] for name in fake.objects if "/blocks/" in name}
        assert second.store(K[:2]) == K[:2]
        assert {name: fake.objects[name] for name in fake.objects if "/blocks/" in name} == stored
        # A PUT that begins after another one was refused looks first, and is not sent.
        assert second.tier.get_stats().answers_conflict in (1, 2)

    def test_without_a_conditional_put_every_put_looks(self, fake: FakeS3, make: Make) -> None:
        rig = make(conditional_put=False, **REMEMBERING).open()
        assert rig.lookup(K[:2]) == 0
        looks = len(fake.asked("HEAD"))
        assert rig.store(K[:2]) == K[:2]
        assert len(fake.asked("HEAD")) == looks + 2

    def test_after_misses_in_a_row_a_lookup_probes_one_block(self, fake: FakeS3, make: Make) -> None:
        rig = make(**REMEMBERING).open()
        for number in range(MISSES_IN_A_ROW):
            assert rig.lookup(keys_of(*range(100 + 8 * number, 108 + 8 * number))) == 0
        looks = len(fake.asked("HEAD"))
        assert rig.lookup(K[:8]) == 0
        assert len(fake.asked("HEAD")) == looks + 1


class TestAccounting:
    def test_requests_are_those_that_the_service_saw(self, fake: FakeS3, make: Make) -> None:
        rig = make().open()
        rig.store(K[:3])
        rig.load(K[:4])
        rig.lookup(K[:8])
        stats = rig.tier.get_stats()
        assert stats.requests == len(fake.seen)
        sent = {method: len(fake.asked(method)) for method in ("HEAD", "PUT")}
        assert (stats.requests_head, stats.requests_put) == (sent["HEAD"], sent["PUT"])
        assert stats.requests_list == len([seen for seen in fake.asked("GET") if not seen.name])
        assert stats.requests_get == len([seen for seen in fake.asked("GET") if seen.name])
        assert stats.requests_delete == 0

    def test_refused_and_absent_objects_are_counted(self, fake: FakeS3, make: Make) -> None:
        rig = make(check_existing=False, retries={"attempts": 1}).open()
        absent = rig.tier.get_stats().answers_absent
        rig.load(K[:2])
        assert rig.tier.get_stats().answers_absent == absent + 2
        fake.fail(412, method="PUT", part="/blocks/")
        assert rig.store(K[:1]) == K[:1]
        fake.fail(507, method="PUT", part="/blocks/")
        assert rig.store(K[1:2]) == []
        stats = rig.tier.get_stats()
        assert (stats.answers_conflict, stats.refused_bytes) == (1, 2 * (BLOCK_BYTES + 128))

    def test_small_blocks_are_warned_about_once(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        rig = make().open()
        assert rig.tier.reset(time.monotonic() + 5)
        assert len(lines(caplog, "blocks of 64 KiB are small")) == 1

    def test_everything_lies_under_the_prefix(self, fake: FakeS3, make: Make) -> None:
        make().open().store(K[:1])
        assert {name.split("/")[1] for name in fake.objects if name.startswith("prod/")} == {"blocks", "documents"}
        assert all(name.startswith("prod/") for name in fake.objects)

    def test_building_opens_nothing(self, fake: FakeS3, make: Make) -> None:
        rig = make()
        assert isinstance(rig.tier, ObjectTier)
        assert rig.tier.traits.medium == "OBJECT"
        assert fake.seen == []


def test_a_prompt_whose_objects_have_vanished_is_uploaded_again_at_once(fake: FakeS3, make: Make) -> None:
    rig = make(**REMEMBERING)
    rig.open()
    prompt = keys_of(*range(32))
    assert rig.store(prompt) == prompt
    with fake.lock:
        for name in [name for name in fake.objects if "/blocks/" in name]:
            del fake.objects[name]
    assert rig.load(prompt[:8]) == []
    assert rig.store(prompt) == prompt
    assert len(block_names(fake)) == 32


def test_a_load_is_cut_into_parts_that_count_one_by_one_at_its_deadline(make: Make) -> None:
    """The number of transfers at a time must not be the number of blocks that a deadline costs."""
    assert make(max_inflight=64).tier.traits.max_load_blocks == 8
    assert make().tier.traits.max_load_blocks == 8
