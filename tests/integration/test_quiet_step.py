"""Steps and small requests make few calls, above all steps without news."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from tiering.api.namespace import ModelIdentity
from tiering.api.request import ReqContext
from tiering.config.stack import open_manager
from tiering.config.stack_file import load_stack
from tiering.manager.waiting import wait_until_idle
from tiering.testing.keys import keys_of

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="quiet step")
BLOCK_BYTES = 64 << 10
MOST_CALLS = 5
"""Largest number of calls at the end of a step while the tiers rest."""
MOST_CALLS_OF_A_TIER = 41
"""Largest number of calls at the end of a step in which a tier on a disk is called."""
MOST_CALLS_PER_REQUEST, MOST_CALLS_PER_REQUEST_WITH_A_DISK = 65, 120
"""Largest number of the manager's calls for a new prompt of three blocks, of eight that run together."""


def calls(function: Callable[[], object]) -> Counter[str]:
    """Return the Python functions that a call of ``function`` runs, with their numbers of calls."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("capacity", ["64MiB", "1GiB"])
def test_a_step_without_news_makes_few_calls(tmp_path: Path, capacity: str) -> None:
    disk = {"type": "local", "path": str(tmp_path), "capacity": capacity}
    stack = load_stack({"primary": {"capacity": "4MiB"}, "secondary": [disk]})
    with open_manager(stack, BLOCK_BYTES, MODEL) as manager:
        assert wait_until_idle(manager)
        resting = min((calls(manager.on_schedule_end) for _ in range(20)), key=Counter.total)
        seen = []
        for _ in range(20):
            manager.news.announce()
            seen.append(calls(manager.on_schedule_end))
    assert resting["TieringOffloadingManager.on_schedule_end"] == 1
    assert resting.total() <= MOST_CALLS, resting
    assert all(counts["BlockTier.on_schedule_end"] == 1 for counts in seen)
    fewest = min(seen, key=Counter.total)
    assert fewest.total() <= MOST_CALLS_OF_A_TIER, fewest


def test_stores_that_end_together_cost_a_disk_one_job(tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path), "capacity": "64MiB"}
    stack = load_stack({"primary": {"capacity": "8MiB"}, "secondary": [disk]})
    keys, number = keys_of(*range(24)), 8
    with open_manager(stack, BLOCK_BYTES, MODEL) as manager:
        assert wait_until_idle(manager)
        requests = [ReqContext(f"request {request}") for request in range(number)]
        stores = [(keys[at * 3 : at * 3 + 3], ctx, True) for at, ctx in enumerate(requests)]
        for part, ctx, _ in stores:
            manager.on_new_request(ctx)
            assert manager.prepare_store(part, ctx) is not None
        seen = calls(lambda: manager.complete_stores(stores))
        seen += calls(lambda: wait_until_idle(manager))
        assert manager.get_stats()["tiers"]["local"]["cascades"] == len(keys)
    assert seen["IoHost.submit"] == seen["BlockTransfers.store"] == seen["BlockTransfers._end"] == 1


@pytest.mark.parametrize(
    ("disk", "most"), [(False, MOST_CALLS_PER_REQUEST), (True, MOST_CALLS_PER_REQUEST_WITH_A_DISK)]
)
def test_new_small_requests_make_few_calls(tmp_path: Path, disk: bool, most: int) -> None:
    stack: dict[str, object] = {"primary": {"capacity": "8MiB"}}
    if disk:
        stack["secondary"] = [{"type": "local", "path": str(tmp_path), "capacity": "64MiB"}]
    keys, number = keys_of(*range(24)), 8
    with open_manager(load_stack(stack), BLOCK_BYTES, MODEL) as manager:
        assert wait_until_idle(manager)
        prompts = [(keys[at * 3 : at * 3 + 3], ReqContext(f"request {at}"), True) for at in range(number)]

        def answer() -> None:
            for prompt, ctx, _ in prompts:
                manager.on_new_request(ctx)
                manager.touch(prompt, ctx)
                assert manager.match_prefix(prompt, ctx) == (0, False)
                assert manager.prepare_store(prompt, ctx) is not None
            manager.complete_stores(prompts)
            for _, ctx, _ in prompts:
                manager.on_request_finished(ctx)

        seen = calls(answer)
        assert wait_until_idle(manager)
        assert manager.match_prefix(keys, ReqContext("another")) == (len(keys), False)
    assert seen.total() <= most * number, seen
