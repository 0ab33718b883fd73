"""The search for a hit: its lookups, the unneeded blocks, and the ends of hits when groups differ."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.connector.fakes import (
    FakeBlocks,
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    FakeSpec,
    ids,
    make_scheduler,
    make_spec,
    prompt,
    run_prompt,
)
from tests.manager_rig import ManagerRig
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.groups import OffloadGroup, build_groups
from tiering.connector.hits import Hit, HitSearch
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.testing.fake_tier import FakeTier

CTX = ReqContext("r1")


def full(size: int, **words: object) -> KVCacheGroup:
    return KVCacheGroup(("a",), size, **words)  # type: ignore[arg-type]


def window(size: int, tokens: int, **words: object) -> KVCacheGroup:
    return KVCacheGroup(("b",), size, tokens, "sliding_window", **words)  # type: ignore[arg-type]


def spec_of(*groups: KVCacheGroup) -> FakeSpec:
    return FakeSpec(EngineConfig(tuple(group.gpu_block_size for group in groups), 4, groups))


def keys_of(request: FakeRequest, groups: tuple[OffloadGroup, ...]) -> list[list[OffloadKey]]:
    return [request.keys(group.group_idx, factor=group.hash_block_size_factor) for group in groups]


class Search:
    """A search over ``groups`` for a prompt of ``tokens`` tokens. All blocks are held at first."""

    def __init__(self, tokens: int, *groups: KVCacheGroup) -> None:
        self.manager = FakeManager(256)
        self.groups = build_groups(spec_of(*groups))
        self.search = HitSearch(self.groups, self.manager)
        self.tokens = tokens
        self.keys = keys_of(prompt(tokens), self.groups)
        for keys in self.keys:
            self.manager.hold(keys)

    def drop(self, group: int, *blocks: int) -> Search:
        self.manager.drop(*(self.keys[group][block] for block in blocks))
        return self

    def hit(self, computed: int = 0, limit: int | None = None) -> int:
        return self.search.longest(self.keys, computed, self.tokens if limit is None else limit, CTX).tokens


class TestTheLastBlock:
    """Offloaded blocks of 8 tokens over GPU blocks of 4: a GPU prefix may end inside an offloaded block."""

    def test_is_not_asked_for_if_its_rest_is_all_there_is_to_load(self) -> None:
        scheduler, manager = make_scheduler(block_size=8)
        request = prompt(16)
        manager.hold(request.keys(factor=2))
        assert scheduler.get_num_new_matched_tokens(request, 12) == (0, False)
        assert manager.asked == []

    def test_is_neither_promoted_nor_waited_for_if_nothing_follows_it(self) -> None:
        request = prompt(32)
        stored = request.keys(factor=2)[:2]
        tier = FakeTier(held=set(stored))
        rig = ManagerRig(8, [tier])
        scheduler = OffloadingConnectorScheduler(make_spec(block_size=8, manager=rig.manager))  # type: ignore[arg-type]
        assert scheduler.get_num_new_matched_tokens(request, 12) == (0, False)
        rig.step()
        assert not tier.loads

    def test_is_brought_in_together_with_the_one_after_it(self) -> None:
        request = prompt(32)
        stored = request.keys(factor=2)[:3]
        tier = FakeTier(held=set(stored))
        rig = ManagerRig(8, [tier])
        scheduler = OffloadingConnectorScheduler(make_spec(block_size=8, manager=rig.manager))  # type: ignore[arg-type]
        assert scheduler.get_num_new_matched_tokens(request, 12) == (None, False)
        rig.step()
        assert [list(job.keys) for job in tier.loads] == [stored[1:]]
        tier.finish_all()
        rig.step()
        assert scheduler.get_num_new_matched_tokens(request, 12) == (12, True)

    def test_is_brought_in_if_what_follows_is_in_the_primary_tier_or_in_a_slower_one(self) -> None:
        request = prompt(32)
        keys = request.keys(factor=2)
        for held_before in (True, False):
            fast, slow = (
                FakeTier("fast", held={keys[1]}),
                FakeTier("slow", held=set() if held_before else set(keys[1:3])),
            )
            rig = ManagerRig(8, [fast, slow])
            if held_before:
                rig.store([keys[2]])
            scheduler = OffloadingConnectorScheduler(make_spec(block_size=8, manager=rig.manager))  # type: ignore[arg-type]
            assert scheduler.get_num_new_matched_tokens(request, 12) == (None, False)
            rig.step()
            assert [list(job.keys) for job in fast.loads + slow.loads] == [[keys[1]] if held_before else keys[1:3]]

    def test_is_waited_for_while_a_tier_does_not_know_about_the_one_after_it(self) -> None:
        request = prompt(32)
        keys = request.keys(factor=2)
        tier = FakeTier(held={keys[1]}, unknown={keys[2]})
        rig = ManagerRig(8, [tier])
        scheduler = OffloadingConnectorScheduler(make_spec(block_size=8, manager=rig.manager))  # type: ignore[arg-type]
        assert scheduler.get_num_new_matched_tokens(request, 12) == (None, False)
        tier.unknown.clear()
        assert scheduler.get_num_new_matched_tokens(request, 12) == (0, False)

    def test_is_not_waited_for_if_the_second_group_lacks_it(self) -> None:
        """The first group's blocks are being written, which does not matter for a hit that cannot be."""
        search = Search(16, full(4), full(4)).drop(1, 0)
        for key in search.keys[0]:
            search.manager.refs[key] = -1
        assert search.search.longest(search.keys, 0, 16, CTX) == Hit(0, False)


class TestBlocksOfUnequalSizes:
    def test_a_hit_ends_inside_a_larger_block_of_another_group(self) -> None:
        search = Search(48, full(4), window(8, 16)).drop(0, 9, 10, 11)
        assert search.hit() == 36
        assert search.manager.asked[-1] == search.keys[1][2:5]

    def test_without_a_common_multiple_within_reach(self) -> None:
        assert Search(44, full(8), full(12)).hit() == 36
        assert Search(20, full(8), full(12)).hit() == 12
        assert Search(32, full(8), full(12)).drop(0, 3).hit() == 24
        assert Search(32, full(8), full(12)).drop(1, 1).hit() == 12

    def test_a_limit_counts_to_the_token(self) -> None:
        assert Search(48, full(4), full(16)).hit(limit=23) == 20

    @pytest.mark.parametrize("missing", range(12))
    def test_no_hit_needs_a_block_that_is_missing(self, missing: int) -> None:
        """Every kind of group is checked token by token against the definition of a hit."""
        kinds = [
            (full(4), window(8, 16)),
            (full(8), window(4, 5)),
            (full(12), window(4, 8, is_eagle=True)),
            (full(4, is_eagle=True), full(12)),
            (full(8), window(4, 6, retained_tokens=3)),
        ]
        for kind, group in product(kinds, (0, 1)):
            search = Search(48, *kind)
            if missing >= len(search.keys[group]):
                continue
            search.drop(group, missing)
            for computed in (0, 4, 12):
                end = search.hit(computed)
                assert end <= computed or not self._needs(search.groups[group], computed, end, missing), (
                    kind,
                    computed,
                    end,
                )

    @staticmethod
    def _needs(group: OffloadGroup, computed: int, end: int, block: int) -> bool:
        """Return True if a hit of ``end`` tokens attends to a token of ``block`` that is not computed."""
        size = group.offloaded_block_size
        oldest = 0 if group.sliding_window is None else end - group.reach
        return any(max(computed, oldest) <= token < end for token in range(block * size, (block + 1) * size))

    def test_the_block_in_which_a_hit_ends_is_loaded_whole(self) -> None:
        spec = spec_of(full(4), window(8, 16))
        scheduler = OffloadingConnectorScheduler(spec)
        request = prompt(45)
        keys = [request.keys(0), request.keys(1, factor=2)]
        spec.manager.hold(keys[0][:9] + keys[1])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (36, True)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(9), [0, 0, 31, 32, 33])), 36)
        ((_, (source, destination)),) = scheduler.loads.take()[0].values()
        assert isinstance(destination, GPULoadStoreSpec)
        assert destination.block_ids.tolist() == [*ids(9), 31, 32, 33]
        assert destination.block_indices == (0, 2)
        assert source.block_ids.tolist() == [spec.manager.rows[key] for key in keys[0][:9] + keys[1][2:5]]  # type: ignore[attr-defined]


class TestSpeculativeHeads:
    def test_a_hit_needs_one_block_more_than_it_loads(self) -> None:
        assert Search(32, full(4, is_eagle=True)).hit() == 28
        assert Search(32, full(4, is_eagle=True)).drop(0, 5).hit() == 16
        assert Search(32, full(4), full(4, is_eagle=True)).drop(0, 5).hit() == 20
        assert Search(32, full(4), window(4, 8, is_eagle=True)).hit() == 28

    def test_the_block_after_a_window_is_asked_for_and_not_loaded(self) -> None:
        search = Search(33, full(4), window(4, 8, is_eagle=True))
        assert search.hit() == 28
        assert search.manager.asked[-1] == search.keys[1][5:8]
        assert search.search.needed(search.keys, 0, 28)[1] == search.keys[1][5:7]

    def test_what_an_engine_retains_before_a_window_is_loaded_too(self) -> None:
        """The engine registers the retained blocks as filled, so they must be loaded."""
        spec = spec_of(full(4), window(4, 8, retained_tokens=3))
        scheduler = OffloadingConnectorScheduler(spec)
        request = prompt(32)
        keys = [request.keys(0), request.keys(1)]
        spec.manager.hold(keys[0] + keys[1])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
        scheduler.update_state_after_alloc(request, FakeBlocks((ids(8), [0] * 5 + [31, 32, 33])), 32)
        ((_, (_, destination)),) = scheduler.loads.take()[0].values()
        assert isinstance(destination, GPULoadStoreSpec)
        assert destination.block_ids.tolist() == [*ids(8), 31, 32, 33]

    def test_blocks_that_may_be_computed_again_are_stored_later(self) -> None:
        spec = spec_of(full(4), full(4, is_eagle=True, volatile_tokens=3))
        scheduler = OffloadingConnectorScheduler(spec)
        request = prompt(16)
        run_prompt(scheduler, request, ids(4), ids(4, 21))
        first, second = request.keys(0), request.keys(1)
        assert spec.manager.offered == [first + second[:3]]
        for token in range(4):
            request.append(100 + token)
            scheduler_output = _decode(request)
            scheduler.build_connector_meta(scheduler_output)
            request.num_computed_tokens += 1
            assert (spec.manager.offered[-1] == second[3:]) is (token >= 2)


def _decode(request: FakeRequest) -> FakeSchedulerOutput:
    return FakeSchedulerOutput().cached(request, 1)


class TestWhatNoHitCanUse:
    """A full-attention group of large blocks beside a window of small ones; hits end with large blocks."""

    @pytest.mark.parametrize("words", [{}, {"is_eagle": True}, {"retained_tokens": 5}])
    @pytest.mark.parametrize("tokens", [2, 5, 8, 12, 40])
    def test_is_exactly_what_is_not_stored(self, tokens: int, words: dict[str, object]) -> None:
        groups = (full(24), window(4, tokens, **words))
        search = Search(100, *groups)
        used: set[OffloadKey] = set()
        for computed, limit in product(range(0, 96, 24), (24, 47, 48, 72, 96, 100)):
            search.hit(computed, limit)
            used.update(key for keys in search.manager.asked for key in keys)
        keys = search.keys[1][: 25 if words.get("is_eagle") else 24]
        group = search.groups[1]
        usable = np.flatnonzero(group.usable(np.arange(len(keys)))) if group.hit_ends else range(len(keys))
        stored = [keys[index] for index in usable]
        spare = {keys[0]} if words.get("is_eagle") else set()
        assert set(stored) - spare == set(keys) & used - spare

    def test_is_not_offered_to_the_manager(self) -> None:
        spec = spec_of(full(16), window(4, 6))
        scheduler = OffloadingConnectorScheduler(spec)
        request = prompt(32)
        meta = run_prompt(scheduler, request, ids(2), ids(8, 21))
        source = meta.reqs_to_store["r1"].spec[0]
        assert isinstance(source, GPULoadStoreSpec)
        assert source.block_ids.tolist() == [1, 2, 23, 24, 27, 28]
        scheduler.build_connector_meta(_decode(request))
        assert len(spec.manager.offered) == 1
        again = prompt(36, "again")
        for key in spec.manager.refs:
            spec.manager.refs[key] = 0
        assert scheduler.get_num_new_matched_tokens(again, 0) == (32, True)

    @pytest.mark.parametrize(
        "groups",
        [(full(4), window(4, 8)), (full(12), window(8, 2)), (window(4, 8), window(8, 2)), (full(8), window(4, 8))],
    )
    def test_is_nothing_where_every_block_is_in_some_window(self, groups: tuple[KVCacheGroup, ...]) -> None:
        assert not any(group.hit_ends for group in build_groups(spec_of(*groups)))
