"""A block tier's document with speeds: when it is written and read."""

from __future__ import annotations

from tests.block_tier.rig import Rig
from tiering.epochs.speeds import SPEEDS
from tiering.errors import TemporaryStoreError
from tiering.secondary.speeds import Speeds, TierSpeeds

FOUND = Speeds(0.01, 0.002, 0.0005)


def part_of(rig: Rig) -> TierSpeeds:
    part = rig.tier.traits.speeds
    assert part is not None
    return part


def run(rig: Rig) -> None:
    rig.io.run_tasks()
    rig.io.poll()


def publish(rig: Rig, speeds: Speeds = FOUND) -> None:
    part_of(rig).publish(speeds)
    run(rig)


def gather(rig: Rig) -> list[Speeds]:
    assert part_of(rig).gather() is None
    run(rig)
    found = part_of(rig).gather()
    assert found is not None
    return list(found)


def auto(*, shared: bool = True) -> Rig:
    return Rig(shared=shared, load_or_compute="auto").opened()


def test_the_next_engine_reads_what_the_last_one_has_published() -> None:
    for shared in (True, False):
        rig = auto(shared=shared)
        assert gather(rig) == []
        publish(rig, Speeds(1.0, 1.0, 1.0))
        publish(rig)
        following = auto(shared=shared)
        following.store.documents |= rig.store.documents
        assert gather(following) == [FOUND]
        assert len([name for name in rig.store.documents if name.startswith(SPEEDS)]) == 1


def test_they_count_in_every_epoch() -> None:
    rig = auto()
    publish(rig)
    assert rig.tier.reset(rig.clock() + 1)
    assert gather(rig) == [FOUND]


def test_a_document_that_does_not_count_or_cannot_be_read_is_none() -> None:
    rig = auto()
    publish(rig)
    (name,) = [name for name in rig.store.documents if name.startswith(SPEEDS)]
    rig.store.documents[name] = b"x" + rig.store.documents[name]
    assert gather(rig) == []
    publish(rig)
    assert gather(rig) == [FOUND]
    rig.store.failure = TemporaryStoreError("no answer")
    assert gather(rig) == []


def test_only_a_tier_with_a_choice_keeps_them_and_only_one_that_stores_publishes() -> None:
    for rule in ("always", "never"):
        assert Rig(load_or_compute=rule).tier.traits.speeds is None
    writer, rig = auto(), Rig(shared=True, load_or_compute="auto", admission="none")
    rig.store.documents = dict(writer.store.documents)
    assert rig.tier.open(rig.clock() + 1)
    publish(rig)
    assert [name for name in rig.store.documents if name.startswith(SPEEDS)] == []
    closed = Rig(shared=True, load_or_compute="auto")
    part_of(closed).publish(FOUND)
    assert part_of(closed).gather() is None


def test_a_shutdown_waits_for_the_document() -> None:
    rig = auto()
    part_of(rig).publish(FOUND)
    assert rig.tier.shutdown(rig.clock() + 8)
    assert any(name.startswith(SPEEDS) for name in rig.store.documents)
