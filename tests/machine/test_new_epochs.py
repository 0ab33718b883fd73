"""A new common epoch reaches the rows of all engines; a service that starts again keeps young rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_s3 import FakeS3
from tests.machine.engines import SmallEngine
from tests.machine.hosts import service_in_thread, service_process
from tests.machine.test_coalescing import bucket
from tiering.cli.app import run
from tiering.machine.service import MachineService
from tiering.secondary.contract import TierContext
from tiering.testing.fake_tier import FakeTier

MEMORY = {"type": "memory", "capacity": "16MiB"}


@pytest.fixture
def fakes() -> list[FakeTier]:
    return []


@pytest.fixture
def service(tmp_path: Path, fakes: list[FakeTier]) -> Iterator[MachineService]:
    def build(context: TierContext) -> FakeTier:
        fakes.append(FakeTier(context.name, admits=set()))
        return fakes[-1]

    with service_in_thread(tmp_path / "cache.sock", MEMORY, fake=build) as running:
        yield running


@pytest.fixture
def engine(service: MachineService) -> Iterator[Callable[[], SmallEngine]]:
    made: list[SmallEngine] = []

    def make() -> SmallEngine:
        made.append(SmallEngine(service.path, ("memory", "fake")))
        assert made[-1].serving(0)
        assert made[-1].serving(1)
        return made[-1]

    yield make
    for one in made:
        one.close()


def attached(service: MachineService) -> int:
    """Return the number of tiers that engines use, each over a connection of its own."""
    peers = [peer for space in service._namespaces.values() for peer in list(space.peers)]
    return sum(peer.hosted is not None and peer.hosted.attached(peer) for peer in peers)


def test_all_engines_empty_their_rows_before_they_use_the_tiers_again(
    service: MachineService, fakes: list[FakeTier], engine: Callable[[], SmallEngine]
) -> None:
    one, two = engine(), engine()
    for number, each in enumerate((one, two)):
        each.store(range(4 * number, 4 * number + 4))
        assert each.settle(lambda each=each: each.stat("cascades", "memory") == 4)  # type: ignore[misc]
    assert (one.manager.new_epochs, two.manager.new_epochs) == (0, 0)
    fakes[0].has_successor = True
    service.wake()
    assert one.settle(lambda: one.manager.new_epochs > 0 and attached(service) == 2)
    assert one.load(range(8)) == ([], [])
    # The other engine's blocks are older: as long as its rows are not empty, it reads and stores nothing.
    assert two.manager.new_epochs == 0
    assert two.manager.secondary_tiers[0].get_stats().available == 1
    two.manager.secondary_tiers[0].get_finished()
    assert two.manager.secondary_tiers[0].get_stats().available == 0
    assert two.settle(lambda: two.manager.new_epochs > 0 and attached(service) == 4)
    assert two.load(range(8)) == ([], [])
    one.store(range(20, 24))
    assert one.settle(lambda: one.stat("cascades", "memory") == 8)
    assert two.load(range(20, 24)) == ([20, 21, 22, 23], [])


@pytest.mark.parametrize("late", [0, 1])
def test_rows_are_emptied_once_though_the_states_of_two_tiers_come_one_by_one(
    service: MachineService,
    fakes: list[FakeTier],
    engine: Callable[[], SmallEngine],
    monkeypatch: pytest.MonkeyPatch,
    late: int,
) -> None:
    one = engine()
    with monkeypatch.context() as during:
        during.setattr(one.manager.secondary_tiers[late], "_poll", lambda: None)
        fakes[0].has_successor = True
        service.wake()
        assert one.settle(lambda: one.manager.new_epochs > 0)
        one.store(range(4))
    assert one.settle(lambda: attached(service) == 2)
    assert one.manager.new_epochs == 1
    assert one.load(range(4)) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize("revision", [None, "step-1"])
def test_a_reset_holds_that_came_while_the_service_of_a_bucket_was_away(
    tmp_path: Path, fake: FakeS3, revision: str | None
) -> None:
    with service_process(tmp_path, bucket(fake), environment=fake.environment()) as service:
        one = SmallEngine(service.socket, ("s3",))
        assert one.serving()
        one.store(range(4))
        assert one.settle(lambda: one.stat("cascades", "s3") == 4)
        service.kill()
        one.weights = 1
        assert not one.manager.reset_cache(revision)
        service.restart()
        assert one.serving()
        assert one.load(range(4)) == ([], [])
        one.store(range(4))
        assert one.settle(lambda: one.stat("cascades", "s3") == 8)
        one.forget_rows()
        assert one.load(range(4)) == ([0, 1, 2, 3], [])
        one.close()


def test_epoch_new_in_a_bucket_reaches_engines_through_a_service_that_was_away(tmp_path: Path, fake: FakeS3) -> None:
    with service_process(tmp_path, bucket(fake), environment=fake.environment()) as service:
        one = SmallEngine(service.socket, ("s3",))
        assert one.serving()
        one.store(range(4))
        assert one.settle(lambda: one.stat("cascades", "s3") == 4)
        service.kill()
        service.restart()
        assert one.serving()
        assert one.manager.new_epochs == 0
        assert one.load(range(4)) == ([0, 1, 2, 3], [])
        service.kill()
        assert run(["epoch", "new", str(tmp_path / "service.yaml"), "--all", "--yes"]) == 0
        service.restart()
        assert one.settle(lambda: one.manager.new_epochs > 0)
        assert one.serving()
        assert one.load(range(4)) == ([], [])
        one.close()
