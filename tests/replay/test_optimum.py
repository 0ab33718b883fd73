"""The optimum: no eviction order hits more with leading blocks, if all blocks are admitted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.replay.traces import write_mooncake
from tiering.replay.model import ReplayModel
from tiering.replay.optimum import Optimum
from tiering.replay.readers import Trace
from tiering.replay.report import table
from tiering.replay.study import run_study
from tiering.replay.sweep import points


def optimum_of(prompts: Sequence[tuple[int, ...]], capacity: int) -> float:
    optimum = Optimum()
    for prompt in prompts:
        optimum.add(np.array(prompt, np.uint64))
    return optimum.hit_rate(capacity)


def exhaustive(prompts: Sequence[tuple[int, ...]], capacity: int) -> int:
    """Return the most hits of prompts of one block each, over all choices of victims."""

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        (block,) = prompts[number]
        if block in held:
            return 1 + best(number + 1, held)
        full = held | {block}
        if len(full) <= capacity:
            return best(number + 1, full)
        return max(best(number + 1, full - {victim}) for victim in full)

    return best(0, frozenset())


def test_the_block_whose_next_use_is_farthest_leaves() -> None:
    prompts = [(1,), (2,), (3,), (1,), (2,), (3,)]
    assert [optimum_of(prompts, capacity) for capacity in range(4)] == [0 / 6, 1 / 6, 2 / 6, 3 / 6]


def test_only_leading_blocks_hit_and_the_tail_of_a_prompt_leaves_first() -> None:
    assert optimum_of([(1, 2, 3), (9,), (1, 2, 3)], 2) == 2 / 7
    assert optimum_of([(1, 2), (2,), (7, 2)], 9) == 1 / 5


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_eviction_has_more_hits(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [(rng.randrange(6),) for _ in range(14)]
    for capacity in (1, 2, 3, 4):
        assert round(optimum_of(prompts, capacity) * 14) == exhaustive(prompts, capacity)


def test_a_replay_with_hints_shows_the_optimum_of_its_memory(tmp_path: Path) -> None:
    trace = Trace([write_mooncake(tmp_path / "t.jsonl", [[1], [2], [3], [1], [2], [3]])])
    stacks = points({"primary": {"capacity": "2MiB"}}, [])
    for share, expected in ((0.0, []), (1.0, ["50.0%"])):
        model = ReplayModel(hinted_sessions=share, device_cache=1 << 20)
        head, rows = table(run_study(trace, stacks, model, 1 << 20))
        assert len({len(row) for row in [head, *rows]}) == 1
        assert [rows[0][at] for at, name in enumerate(head) if name == "cpu optimum"] == expected
