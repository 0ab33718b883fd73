"""The latest reset decides what a service holds, in whatever order engines join and resets arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest

from tests.machine.engines import SmallEngine
from tests.machine.hosts import ServiceProcess, service_in_thread, service_process
from tests.machine.test_service import Raw
from tiering.machine.messages import SERVING, Kind, Record
from tiering.machine.words import START, read_state, revision_weights
from tiering.testing.clock import until
from tiering.testing.fake_tier import FakeTier

PATIENCE = 60.0
NAMES = ("stale", "old", "new")


class Member:
    """An engine that was reset to a revision of its name at a time, or never."""

    def __init__(self, path: Path, name: str, reset_at: float) -> None:
        self.name = START if not reset_at else revision_weights(name)
        self.raw = Raw(path, tier="fake", weights=self.name)
        state = self.raw.receive(Kind.STATE)
        self.raw.send(Record(Kind.FOLLOWED, state.number))
        if reset_at:
            self.raw.send(Record(Kind.RESET, seconds=reset_at, text=self.name.encode()))

    def state(self, weights: str) -> bool:
        """Wait for the state of the tier with ``weights``, and return True if this engine is served."""
        while True:
            state = self.raw.receive(Kind.STATE)
            if read_state(state.text)[0] == weights and state.flag & SERVING:
                return self.name == weights


@pytest.mark.parametrize("order", list(permutations(NAMES)))
def test_the_engine_that_was_reset_last_has_the_tiers(tmp_path: Path, order: tuple[str, ...]) -> None:
    times = {"stale": 0.0, "old": 2.0, "new": 3.0}
    with service_in_thread(tmp_path / "cache.sock", fake=lambda context: FakeTier(context.name)):
        members = [Member(tmp_path / "cache.sock", name, times[name]) for name in order]
        served = [member.name for member in members if member.state(revision_weights("new"))]
        assert served == [revision_weights("new")]
        latest = next(member for member in members if member.name == revision_weights("new"))
        latest.raw.close()
        left = [member for member in members if member is not latest]
        served = [member.name for member in left if member.state(revision_weights("old"))]
        assert served == [revision_weights("old")]  # not the one of the start, which may have joined first
        for member in left:
            member.raw.close()


def test_a_time_ahead_of_the_machine_counts_as_now(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "cache.sock", fake=lambda context: FakeTier(context.name)):
        ahead = Member(tmp_path / "cache.sock", "ahead", 9e8)
        assert ahead.state(revision_weights("ahead"))
        later = Member(tmp_path / "cache.sock", "later", 0.0)
        later.name = revision_weights("later")
        later.raw.send(Record(Kind.RESET, text=later.name.encode()))  # without a time, as of an earlier version
        assert later.state(later.name)
        for member in (ahead, later):
            member.raw.close()


# ------------------------------------------------------------------------------------------------------- real engines


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "16MiB"}
    with service_process(tmp_path, disk) as running:
        yield running


@pytest.fixture
def engine(service: ServiceProcess, tmp_path: Path) -> Iterator[Callable[[str], SmallEngine]]:
    """Return a maker of engines. Each connects by a link of its name, which a test can take away."""
    made: list[SmallEngine] = []

    def make(name: str) -> SmallEngine:
        (tmp_path / name).symlink_to(service.socket)
        made.append(SmallEngine(tmp_path / name))
        assert made[-1].serving()
        return made[-1]

    yield make
    for one in made:
        one.close()


def out(one: SmallEngine) -> bool:
    return one.settle(lambda: not one.manager.secondary_tiers[0].serving)  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["reset", "stale"])
def test_after_a_restart_neither_order_gives_an_engine_blocks_of_other_weights(
    service: ServiceProcess, engine: Callable[[str], SmallEngine], tmp_path: Path, first: str
) -> None:
    reset, twin, stale = engine("reset"), engine("twin"), engine("stale")
    for one in (reset, twin):
        one.weights = 1
        one.manager.reset_cache("step-1")
        assert one.serving()
    reset.store(range(8))
    assert reset.stored()
    assert out(stale)
    late = {"reset": "stale", "stale": "reset"}[first]
    for name in (late, "twin"):
        (tmp_path / name).unlink()
    service.kill()
    assert all(map(out, (reset, twin)))
    service.restart()
    early = reset if first == "reset" else stale
    assert early.serving()
    early.store(range(50, 54))
    assert early.stored()
    for name in (late, "twin"):
        (tmp_path / name).symlink_to(service.socket)
    assert twin.serving()
    assert reset.serving()
    assert out(stale)
    numbers = [*range(8), *range(50, 54)]
    for one in (reset, twin, stale):
        one.forget_rows()
        assert one.load(numbers)[1] == []
    reset.store(range(60, 64))
    assert reset.stored()
    assert twin.load(range(60, 64)) == (list(range(60, 64)), [])
    assert stale.load(range(60, 64)) == ([], [])


def test_a_reset_that_reaches_the_service_late_does_not_undo_a_later_one(
    service: ServiceProcess, engine: Callable[[str], SmallEngine], tmp_path: Path
) -> None:
    slow, quick = engine("slow"), engine("quick")
    (tmp_path / "slow").unlink()
    service.kill()
    assert all(map(out, (slow, quick)))
    slow.weights = 1
    assert not slow.manager.reset_cache("step-1")
    service.restart()
    assert quick.serving()
    quick.weights = 2
    quick.manager.reset_cache("step-2")
    assert quick.serving()
    (tmp_path / "slow").symlink_to(service.socket)
    assert until(lambda: service.log.count("uses the tier local") == 2, PATIENCE)
    slow.manager.on_schedule_end()
    quick.store(range(4))
    assert quick.stored()
    assert slow.load(range(4)) == ([], [])
    assert quick.load(range(4)) == (list(range(4)), [])
    assert quick.manager.secondary_tiers[0].serving  # type: ignore[attr-defined]
