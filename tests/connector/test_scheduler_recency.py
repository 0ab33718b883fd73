"""The head of a prompt outlives its tail in the CPU tier, in whatever order its blocks were stored."""

from __future__ import annotations

import numpy as np
import pytest

from tests.connector.fakes import FakeRequest, FakeSpec, finished, go_on, ids, make_spec, prompt, run_prompt
from tiering.api.request import ReqContext
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager


class RealManagerSpec(FakeSpec):
    """A spec with a real manager of eight rows and no secondary tiers."""

    eviction = "lru"

    def get_manager(self) -> TieringOffloadingManager:
        primary = CPUPrimaryTierOffloadingManager(np.zeros((8, 16), np.uint8).data, self.eviction)
        self.real = TieringOffloadingManager(primary)
        return self.real


def make(eviction: str = "lru") -> tuple[OffloadingConnectorScheduler, RealManagerSpec]:
    plain = make_spec()
    spec = RealManagerSpec(plain.engine, plain.extra_config)
    spec.eviction = eviction
    return OffloadingConnectorScheduler(spec), spec


@pytest.mark.parametrize("name", ["r1", "r" * 100], ids=["short id", "long id"])
@pytest.mark.parametrize("ends", [False, True], ids=["running", "finished"])
def test_of_a_prompt_stored_chunk_by_chunk_the_tail_is_evicted_first(ends: bool, name: str) -> None:
    scheduler, spec = make()
    request, other = prompt(32, name), prompt(16, "other")
    other.all_token_ids = [100 + token for token in other.all_token_ids]
    other.update_hashes()
    first = run_prompt(scheduler, request, ids(4), tokens=16).reqs_to_store[name].job_id
    second = go_on(scheduler, request, 16, ids(4, 5)).reqs_to_store[name].job_id
    scheduler.update_connector_output(finished(first))
    scheduler.update_connector_output(finished(second))
    if ends:
        scheduler.request_finished(request, ids(8))
    assert "other" in run_prompt(scheduler, other, ids(4, 9)).reqs_to_store
    ctx, keys = ReqContext(name), request.keys()
    assert [spec.real.lookup(key, ctx) for key in keys] == [True] * 4 + [False] * 4


def test_blocks_stored_in_one_piece_are_not_touched_again() -> None:
    scheduler, spec = make()
    touched: list[int] = []
    spec.real.touch = lambda keys, ctx, used=True: touched.append(len(keys))  # type: ignore[method-assign, assignment]
    request = prompt(32)
    job = run_prompt(scheduler, request, ids(8)).reqs_to_store["r1"].job_id
    scheduler.update_connector_output(finished(job))
    scheduler.request_finished(request, ids(8))
    assert touched == [8], "when it was first seen"


def other_prompt(tokens: int, name: str, first: int) -> FakeRequest:
    """A prompt whose tokens count up from ``first``."""
    request = prompt(tokens, name)
    request.all_token_ids = list(range(first, first + tokens))
    request.update_hashes()
    return request


def store_in_two_pieces(scheduler: OffloadingConnectorScheduler, request: FakeRequest) -> None:
    """Run a prompt of 16 tokens to its end, in two steps that store one half each."""
    name = request.request_id
    for meta in (run_prompt(scheduler, request, ids(2), tokens=8), go_on(scheduler, request, 8, ids(2, 3))):
        scheduler.update_connector_output(finished(meta.reqs_to_store[name].job_id))
    scheduler.request_finished(request, ids(4))


@pytest.mark.parametrize(("eviction", "kept"), [("lru", False), ("arc", True)])
def test_prompts_used_once_push_out_blocks_used_twice_under_lru_only(eviction: str, kept: bool) -> None:
    scheduler, spec = make(eviction)
    hot = prompt(16, "first")
    store_in_two_pieces(scheduler, hot)
    again = prompt(16, "again")
    scheduler.get_num_new_matched_tokens(again, 16)
    scheduler.request_finished(again, ())
    for number in range(6):
        store_in_two_pieces(scheduler, other_prompt(16, f"scan {number}", 1000 * (number + 1)))
    keys, ctx = hot.keys(), ReqContext("")
    assert [spec.real.lookup(key, ctx) for key in keys] == [kept] * 4
