"""Windows that are stored sparsely: before the ends of prompts, and where prompts part.

Blocks have 4 tokens. A window of 9 tokens reaches 8 tokens back, so that a hit needs two blocks of it.
"""

from __future__ import annotations

import random

import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    FakeSpec,
    finished,
    go_on,
    ids,
    prompt,
    run_prompt,
)
from tests.connector.test_hits import full, window
from tests.manager_rig import ManagerRig
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.connector.groups import build_groups
from tiering.connector.hits import HitSearch
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.testing.fake_tier import FakeTier

PAIR = (full(4), window(4, 9))


def engine_of(groups: tuple[KVCacheGroup, ...], interval: int | None) -> EngineConfig:
    return EngineConfig(tuple(group.gpu_block_size for group in groups), 4, groups, retention_interval=interval)


class Rig:
    """A scheduler half, whose stores end within their step."""

    def __init__(
        self, *groups: KVCacheGroup, interval: int | None = 0, manager: FakeManager | None = None, **extra: object
    ) -> None:
        self.groups = groups or PAIR
        spec = FakeSpec(engine_of(self.groups, interval), extra, manager)
        self.manager = spec.manager
        self.scheduler = OffloadingConnectorScheduler(spec, clock=lambda: 0.0)

    def run(self, request: FakeRequest, tokens: int | None = None, hit: int = 0) -> None:
        """Compute a prompt, after the load of a hit of ``hit`` tokens."""
        blocks = -(-request.num_tokens // 4)
        tables = [ids(blocks, 1 + 100 * index) for index in range(len(self.groups))]
        if hit:
            assert self.scheduler.get_num_new_matched_tokens(request, 0) == (hit, True)
            self.scheduler.update_state_after_alloc(request, FakeBlocks(tuple(tables)), hit)
            self.end(self.scheduler.build_connector_meta(FakeSchedulerOutput()))
            self.scheduler.update_state_after_alloc(request, FakeBlocks(tuple(tables)), 0)
            request.num_computed_tokens = hit
            meta = self.scheduler.build_connector_meta(
                FakeSchedulerOutput().new(request, request.num_tokens - hit, *tables)
            )
            request.num_computed_tokens = request.num_tokens
        else:
            meta = run_prompt(self.scheduler, request, *tables, tokens=tokens)
        self.end(meta)

    def end(self, meta: OffloadingConnectorMetadata) -> None:
        orders = [*meta.reqs_to_store.values(), *meta.reqs_to_load.values()]
        self.scheduler.update_connector_output(
            finished(*(order.job_id for order in orders), finished_recving={*meta.reqs_to_load})
        )

    def held(self, request: FakeRequest, group: int = 1) -> list[int]:
        """Return the positions of the blocks of a group that are held."""
        size = self.groups[group].gpu_block_size // 4
        return [place for place, key in enumerate(request.keys(group, size)) if key in self.manager.rows]

    def hit(self, request: FakeRequest) -> int:
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0] or 0


def parting(at: int, tokens: int, name: str) -> FakeRequest:
    """Return a prompt that has its first ``at`` tokens in common with :func:`prompt`."""
    return FakeRequest(name, [*range(at), *range(1000 * int(name[1:]), 1000 * int(name[1:]) + tokens - at)])


@pytest.mark.parametrize(
    ("tokens", "held"),
    [(41, [7, 8, 9]), (43, [7, 8, 9]), (40, [6, 7, 8, 9]), (39, [6, 7, 8]), (12, [0, 1, 2]), (4, [0]), (3, [])],
)
def test_a_prompt_keeps_the_window_before_its_end_for_itself_and_for_its_next_turn(
    tokens: int, held: list[int]
) -> None:
    rig = Rig()
    rig.run(request := prompt(tokens))
    assert rig.held(request) == held
    assert rig.held(request, 0) == list(range(tokens // 4))
    assert rig.hit(prompt(tokens + 50, "r2")) == tokens - tokens % 4
    assert rig.hit(prompt(tokens, "r3")) >= (tokens - 1) // 4 * 4


@pytest.mark.parametrize("kept", [43, 41, 39, 37])
def test_the_next_turn_has_a_hit_where_its_template_leaves_out_the_last_tokens_of_the_prompt(kept: int) -> None:
    rig = Rig()
    rig.run(prompt(43))
    assert rig.hit(parting(kept, 90, "r2")) == kept - kept % 4


def test_chunks_of_a_prompt_keep_no_window_before_its_end() -> None:
    rig = Rig()
    rig.run(request := prompt(43), tokens=20)
    assert rig.held(request) == []
    rig.end(go_on(rig.scheduler, request, 14))
    assert rig.held(request) == [7]
    rig.end(go_on(rig.scheduler, request, 9))
    assert rig.held(request) == [7, 8, 9]


@pytest.mark.parametrize(
    ("interval", "held"),
    [
        (None, list(range(10))),
        (0, [7, 8, 9]),
        (16, [2, 3, 6, 7, 8, 9]),
        (13, [2, 3, 6, 7, 8, 9]),
        (8, list(range(10))),
    ],
    ids=["dense", "ends of prompts", "every 16", "rounded up to 16", "no longer than the window"],
)
def test_windows_are_kept_at_the_interval_too(interval: int | None, held: list[int]) -> None:
    rig = Rig(interval=interval)
    rig.run(request := prompt(41))
    assert rig.held(request) == held
    if interval == 16:
        assert rig.hit(parting(35, 60, "r2")) == 32


def test_where_prompts_part_the_second_keeps_the_window_for_the_third() -> None:
    rig = Rig()
    rig.run(prompt(60))
    rig.run(second := parting(30, 60, "r2"))
    assert rig.held(second) == [5, 6, 11, 12, 13, 14]
    assert rig.hit(parting(30, 60, "r3")) == 28
    dense = Rig(interval=None)
    dense.run(prompt(60))
    assert dense.hit(parting(30, 60, "r3")) == 28, "control: the second has a hit where all windows are stored"


def test_where_the_engine_saw_prompts_part_the_window_is_kept() -> None:
    rig = Rig()
    request = prompt(60)
    request.shared_prefix_boundary = 28  # type: ignore[attr-defined]
    rig.run(request)
    assert rig.held(request) == [5, 6, 11, 12, 13, 14]


def test_where_a_hit_ended_the_window_is_stored_again_if_it_was_evicted_meanwhile() -> None:
    rig = Rig()
    rig.run(first := prompt(42))
    rig.scheduler.request_finished(first, [])
    longer = prompt(82, "r2")
    rig.run(longer, hit=40)
    assert rig.held(longer) == [7, 8, 9, 17, 18, 19]
    rig.manager.drop(*longer.keys(1)[8:10])
    third = prompt(122, "r3")
    assert rig.hit(third) == 80
    fourth = parting(41, 82, "r4")
    rig.scheduler.get_num_new_matched_tokens(fourth, 40)
    blocks = (ids(21), [*[0] * 8, *ids(13, 101)])
    rig.scheduler.update_state_after_alloc(fourth, FakeBlocks(blocks), 0)
    fourth.num_computed_tokens = 40
    rig.end(rig.scheduler.build_connector_meta(FakeSchedulerOutput().new(fourth, 42, *blocks)))
    assert rig.held(fourth) == [7, 8, 9, 17, 18, 19]


def test_all_blocks_of_an_answer_are_stored() -> None:
    """The engine overwrites the window of a request that has ended, and an answer may end anywhere."""
    rig = Rig(offload_prompt_only=False)
    rig.run(request := prompt(42))
    for token in range(42, 71):
        request.append(token)
        rig.end(go_on(rig.scheduler, request, 1, *(() if token % 4 else ([200 + token], [300 + token]))))
    assert rig.held(request) == list(range(7, 17))
    assert rig.hit(prompt(90, "r2")) == 68


def test_the_limit_of_a_request_is_the_end_of_what_it_stores() -> None:
    rig = Rig()
    request = prompt(60, kv_transfer_params={"kv_tiering": {"max_store_tokens": 30}})
    rig.run(request)
    assert rig.held(request) == [4, 5, 6]
    assert rig.hit(prompt(60, "r2")) == 28


def test_a_lookahead_needs_a_block_after_the_end_and_an_end_before_the_place_of_parting() -> None:
    rig = Rig(full(4), window(4, 9, is_eagle=True))
    rig.run(request := prompt(61))
    assert rig.held(request) == [11, 12, 13, 14]
    assert rig.hit(prompt(100, "r2")) == 56
    rig.run(second := parting(30, 60, "r3"))
    assert rig.held(second) == [4, 5, 6, 7, 10, 11, 12, 13, 14]
    assert rig.hit(parting(30, 60, "r4")) == 24


@pytest.mark.parametrize(
    "groups",
    [
        (window(4, 9),),
        (full(4), window(12, 20)),
        (full(4), KVCacheGroup(("c",), 4, 16, "chunked_local_attention")),
    ],
    ids=["no full attention", "blocks larger than those of full attention", "chunks"],
)
def test_other_groups_store_all_that_a_hit_can_use(groups: tuple[KVCacheGroup, ...]) -> None:
    rig = Rig(*groups)
    rig.run(request := prompt(49))
    last = len(groups) - 1
    assert rig.held(request, last) == list(range(48 // groups[last].gpu_block_size))


def test_windows_of_small_blocks_keep_those_before_ends_of_large_ones() -> None:
    rig = Rig(full(16), window(4, 6))
    rig.run(request := prompt(70))
    assert rig.held(request) == [10, 11, 14, 15]


@pytest.mark.parametrize("probes", [64, 10**9])
def test_a_search_finds_the_last_window_of_a_long_prompt_in_a_few_calls(probes: int) -> None:
    groups = build_groups(FakeSpec(engine_of(PAIR, 0)))
    manager, request = FakeManager(), prompt(20_000)
    manager.hold(request.keys(0))
    manager.hold(request.keys(1)[298:300])
    manager.hold(request.keys(1)[2000:2001])  # half of a window
    search = HitSearch(groups, manager, probes)
    keys = [request.keys(0), request.keys(1)]
    assert search.longest(keys, 0, 20_000, ReqContext("r1")) == (1200, False, 20_000)
    assert len(manager.asked) <= 64


def test_random_windows_are_found_as_by_trying_each_end() -> None:
    groups = build_groups(FakeSpec(engine_of((*PAIR, window(4, 22)), 0)))
    for seed in range(300):
        dice, manager, request = random.Random(seed), FakeManager(), prompt(400)
        manager.hold(request.keys(0)[: dice.randrange(101)])
        for _ in range(dice.randrange(6)):
            end = dice.randrange(101)
            manager.hold(request.keys(1)[max(0, end - dice.randrange(4)) : end])
            manager.hold(request.keys(2)[max(0, end - dice.randrange(8)) : end])
        held = manager.rows.keys()
        keys = [request.keys(group) for group in range(3)]

        def is_hit(end: int, keys: list[list[bytes]] = keys, held: object = held) -> bool:
            needed = [*keys[0][:end], *keys[1][max(0, end - 2) : end], *keys[2][max(0, end - 6) : end]]
            return all(key in held for key in needed)  # type: ignore[operator]

        expected = next(end for end in range(100, -1, -1) if is_hit(end))
        assert HitSearch(groups, manager).longest(keys, 0, 400, ReqContext("r1")).tokens == expected * 4, seed


@pytest.mark.parametrize(("windows", "tokens", "loaded"), [((), 0, 0), ((18, 20), 80, 22), ((98, 100), 400, 102)])
def test_full_attention_is_promoted_as_far_as_the_windows_leave_a_hit(
    windows: tuple[int, ...], tokens: int, loaded: int
) -> None:
    """Behind that end, the blocks would be read in vain, and the request would wait for them."""
    request = prompt(400)
    tier = FakeTier(held={*request.keys(0), *request.keys(1)[slice(*windows) if windows else slice(0)]})
    rig = ManagerRig(512, [tier])
    search = HitSearch(build_groups(FakeSpec(engine_of(PAIR, 0))), rig.manager)
    keys, waits = [request.keys(0), request.keys(1)], 0
    while (hit := search.longest(keys, 0, 400, rig.ctx)).pending:
        waits += 1
        rig.step()
        tier.finish_all()
        rig.step()
    assert hit == (tokens, False, 0 if tokens == 400 else 400)
    assert waits == bool(tokens)
    assert len(rig.primary.readable.known([*keys[0], *keys[1]])) == loaded


class SlowToAnswer(FakeTier):
    """A tier that decides about a block after it was asked once, as one over a network does."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        known = key in self.asked
        answer = super().lookup(key, req_context)
        return answer if known else None


def test_slow_tiers_are_asked_about_all_windows_before_an_answer_is_waited_for() -> None:
    request = prompt(400)
    tier = SlowToAnswer(held=set(request.keys(1)[18:20]))
    rig = ManagerRig(512, [tier])
    rig.store(request.keys(0))
    search = HitSearch(build_groups(FakeSpec(engine_of(PAIR, 0))), rig.manager)
    keys, waits = [request.keys(0), request.keys(1)], 0
    while (hit := search.longest(keys, 0, 400, rig.ctx)).pending:
        waits += 1
        rig.step()
        tier.finish_all()
        rig.step()
    assert hit == (80, False, 400)
    assert waits <= 5, "instead of one for each window"
