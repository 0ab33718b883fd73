"""A fleet in simulated time: an engine starts with the blocks that an earlier one has published."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.traces import BLOCK_BYTES, BLOCK_TOKENS, request
from tiering.config.stack_file import load_stack
from tiering.replay.model import ReplayModel
from tiering.replay.replay import Replay
from tiering.replay.stack import SimulatedFleet

TIERS = {"secondary": [{"type": "s3", "bucket": "kv-cache"}]}


def engine(fleet: SimulatedFleet | None, rows: int = 8, **words: Any) -> Replay:
    stack = load_stack({"primary": {"capacity": rows * BLOCK_BYTES}, **TIERS, **words})
    return Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, ReplayModel(), fleet=fleet)


@pytest.mark.parametrize(("words", "hits"), [({}, [0, 4]), ({"warm_start": {}}, [4, 0])])
def test_a_new_engine_hits_its_cpu_tier_only_if_it_starts_warm(words: dict[str, Any], hits: list[int]) -> None:
    fleet = SimulatedFleet()
    engine(fleet, warm_start={}).run([request(0, range(4)), request(50, range(4))])
    new = engine(fleet, **words)
    new.start_warm()
    assert [tier.hit_blocks for tier in new.run([request(0, range(4))]).tiers] == hits


def test_a_warm_start_takes_time_and_no_more_than_its_bytes() -> None:
    fleet = SimulatedFleet()
    engine(fleet, warm_start={}).run([request(0, range(4)), request(50, range(4))])
    new = engine(fleet, warm_start={"bytes": 2 * BLOCK_BYTES, "bandwidth": BLOCK_BYTES})
    assert new.start_warm() > 1.0
    assert new.stack.manager.get_stats()["primary"]["blocks"] == 2


def test_an_engine_of_no_fleet_starts_cold() -> None:
    engine(None, warm_start={}).run([request(0, range(4))])
    new = engine(None, warm_start={})
    assert new.start_warm() == 0.0
    assert [tier.hit_blocks for tier in new.run([request(0, range(4))]).tiers] == [0, 0]


def test_requests_keep_their_distances_behind_a_warm_start() -> None:
    """They would otherwise arrive together at its end, and wait for the loads of one another."""
    fleet = SimulatedFleet()
    engine(fleet, warm_start={}).run([request(0, range(4)), request(50, range(4))])
    new = engine(fleet, warm_start={"bandwidth": BLOCK_BYTES})
    seconds = new.start_warm()
    assert seconds > 1.0
    result = new.run([request(100, range(8)), request(100.5, range(8))])
    assert result.trace_seconds == pytest.approx(seconds + 0.5)
    assert result.ttft_mean < 0.5
