"""Loads of other connectors: unfilled blocks and blocks computed on top of them are never visible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace

import pytest

from examples.mini_engine.request import Request
from examples.mini_engine.scheduler import CachedRequests, ConnectorOutput, NewRequest, SchedulerOutput
from examples.mini_engine.simple import MirroredPool
from tests.simple.simulation import BLOCK, make_scheduler, tokens
from tiering.api.keys import make_offload_key
from tiering.simple.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

FILLED = 6
"""Number of blocks, of 10, that another connector claims to have loaded."""


class Engine:
    """A scheduler half, the engine's pool, and vLLM's steps; blocks have names once allocated."""

    def __init__(self, *, lazy: bool = False, world_size: int = 1, gpu_blocks: int = 64, cpu_blocks: int = 64) -> None:
        self.half = make_scheduler(gpu_blocks, cpu_blocks, lazy=lazy, world_size=world_size)
        self.pool = MirroredPool(gpu_blocks)
        self.half.bind_gpu_block_pool(self.pool)
        self.tables: dict[str, list[int]] = {}

    def allocate(self, name: str, text: Sequence[int], found: Sequence[int] = ()) -> Request:
        """Allocate blocks for a new request; ``found`` blocks come from the engine's cache."""
        request = Request(name, text, 20)
        request.update_hashes(BLOCK)
        blocks = [self.pool.blocks[block] for block in found]
        self.pool.touch(blocks)
        blocks += self.pool.take(-(-len(text) // BLOCK) - len(blocks))
        for block, block_hash in zip(blocks, request.block_hashes, strict=False):
            self.pool.name(block, (0, block_hash))
        self.tables[name] = [block.block_id for block in blocks]
        self.half.on_new_request(request)
        self.half.get_num_new_matched_tokens(request, len(found) * BLOCK)
        self.half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (self.tables[name],)), 0)
        return request

    def start(
        self, name: str, text: Sequence[int], found: Sequence[int] = (), filled: int = 0
    ) -> tuple[Request, SimpleCPUOffloadMetadata]:
        """Run a request's first step; another connector loads ``filled`` blocks, the step computes the rest."""
        request = self.allocate(name, text, found)
        request.num_computed_tokens = max(len(found), filled) * BLOCK
        output = SchedulerOutput([NewRequest(name, (self.tables[name],), request.num_computed_tokens)])
        return request, self._step(output, request, request.num_tokens - request.num_computed_tokens)

    def go_on(self, request: Request, count: int) -> SimpleCPUOffloadMetadata:
        """Compute ``count`` more tokens of a running request."""
        return self._step(SchedulerOutput([], CachedRequests()), request, count)

    def idle(self) -> SimpleCPUOffloadMetadata:
        """Run a step without tokens."""
        return self.half.build_connector_meta(SchedulerOutput())

    def _step(self, output: SchedulerOutput, request: Request, count: int) -> SimpleCPUOffloadMetadata:
        output.num_scheduled_tokens[request.request_id] = count
        meta = self.half.build_connector_meta(output)
        request.num_computed_tokens += count
        return meta

    def report(self, *metas: SimpleCPUOffloadMetadata, unfilled: Collection[int] = ()) -> None:
        """Report the ends of the stores of ``metas``, and that the blocks ``unfilled`` were not filled."""
        meta = SimpleCPUOffloadWorkerMetadata({meta.store_event: 1 for meta in metas if meta.store_event >= 0})
        self.half.update_connector_output(ConnectorOutput(set(), set(), set(unfilled), None, meta))

    def finish(self, request: Request) -> None:
        table = self.tables.pop(request.request_id)
        self.half.request_finished_all_groups(request, (table[: -(-request.num_computed_tokens // BLOCK)],))
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(table)])

    def held(self, request: Request) -> list[int]:
        """Return the indexes of the blocks of ``request`` that the CPU pool can find."""
        cached = self.half.cpu_block_pool.cached
        return [index for index, name in enumerate(request.block_hashes) if make_offload_key(name, 0) in cached]

    def check_nothing_is_held(self) -> None:
        assert len(self.half.cpu_block_pool.refs) == 0
        assert not self.half.cpu_block_pool.pending
        assert not self.half.has_pending_work()


TEXT = tokens(1, 40)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_store_of_blocks_that_were_not_filled_never_becomes_visible(deferred: bool) -> None:
    engine = Engine()
    request, meta = engine.start("a", TEXT, filled=FILLED)
    assert meta.store_gpu_blocks == engine.tables["a"][:FILLED]
    engine.report(*([] if deferred else [meta]), unfilled={meta.store_gpu_blocks[1]})
    engine.report(*([meta] if deferred else []))
    assert engine.held(request) == [0]  # block 1 is the first one that was not filled
    engine.check_nothing_is_held()


def test_nor_if_only_one_of_two_workers_reports_the_failure() -> None:
    engine = Engine(world_size=2)
    request, meta = engine.start("a", TEXT, filled=FILLED)
    engine.report(meta, unfilled={meta.store_gpu_blocks[0]})
    engine.report(meta)
    assert engine.held(request) == []
    engine.check_nothing_is_held()


def test_nothing_is_stored_until_the_engine_has_gone_back_and_then_all_of_it() -> None:
    engine = Engine()
    request, meta = engine.start("a", TEXT, filled=FILLED)
    engine.report(meta, unfilled={meta.store_gpu_blocks[1]})
    assert engine.go_on(request, 1).store_gpu_blocks == []
    request.num_computed_tokens = BLOCK
    engine.report(engine.go_on(request, 20))
    assert engine.held(request) == [0]
    engine.report(engine.go_on(request, 16))
    engine.report(engine.go_on(request, 1))
    assert engine.held(request) == list(range(10))
    engine.check_nothing_is_held()


def test_the_request_may_have_failed_before_its_blocks_are_reported() -> None:
    """With vLLM's policy "fail" the engine ends the request before it reports the blocks."""
    engine = Engine()
    request, meta = engine.start("a", TEXT, filled=FILLED)
    unfilled = meta.store_gpu_blocks[1]
    request.num_computed_tokens = BLOCK
    engine.finish(request)
    engine.report(meta, unfilled={unfilled})
    engine.report(engine.idle())
    assert engine.held(request) == [0]
    engine.check_nothing_is_held()


def test_what_was_ordered_at_the_end_of_a_request_is_judged_too() -> None:
    """The request was aborted while the step ran, so the engine does not recompute its blocks."""
    engine = Engine()
    request, meta = engine.start("a", TEXT, filled=FILLED)
    engine.finish(request)
    engine.report(meta, unfilled={meta.store_gpu_blocks[1]})
    engine.report(engine.idle())
    assert engine.held(request) == [0]
    engine.check_nothing_is_held()


def test_what_is_left_over_of_it_is_dropped() -> None:
    engine = Engine(cpu_blocks=7)
    request, meta = engine.start("a", TEXT, filled=FILLED)
    engine.finish(request)
    engine.report(meta, unfilled={meta.store_gpu_blocks[1]})
    for _ in range(4):
        engine.report(engine.idle())
    assert engine.held(request) == [0]
    engine.check_nothing_is_held()


def test_a_request_that_ends_before_another_connector_has_loaded_its_blocks_stores_nothing() -> None:
    engine = Engine()
    request = engine.allocate("a", TEXT)
    engine.report(engine.idle())
    request.num_computed_tokens = FILLED * BLOCK  # vLLM counts these tokens as computed while an asynchronous load runs
    engine.finish(request)
    engine.report(engine.idle())
    assert engine.held(request) == []
    engine.check_nothing_is_held()


def test_a_request_that_found_the_blocks_and_does_not_go_back_is_never_stored() -> None:
    engine = Engine()
    first, meta = engine.start("a", TEXT, filled=FILLED)
    table = engine.tables["a"]
    second, also = engine.start("b", [*TEXT, *tokens(2, 20)], found=table)
    engine.report(meta, also, unfilled={table[0]})
    assert engine.go_on(second, 1).store_gpu_blocks == []
    engine.finish(second)
    first.num_computed_tokens = 0
    engine.report(engine.go_on(first, 40))
    engine.report(engine.go_on(first, 1))
    assert engine.held(second) == engine.held(first) == list(range(10))
    engine.check_nothing_is_held()


def test_what_others_find_in_the_engines_cache_is_stored_as_far_as_it_was_recomputed() -> None:
    engine = Engine()
    request, meta = engine.start("a", TEXT, filled=FILLED)
    table = engine.tables["a"]
    engine.report(meta, unfilled={table[0]})
    request.num_computed_tokens = 0
    engine.go_on(request, 20)
    good, first = engine.start("good", [*TEXT[:20], *tokens(3, 8)], found=table[:5])
    bad, second = engine.start("bad", [*TEXT[:24], *tokens(4, 8)], found=table[:6])
    engine.report(first, second)
    for other in (good, bad):
        engine.report(engine.go_on(other, 1))
    assert engine.held(good) == list(range(7))
    assert engine.held(bad) == list(range(5))


class TestLazy:
    def test_blocks_of_a_request_that_was_aborted_while_they_were_not_filled_are_not_stored(self) -> None:
        """The engine does not revisit blocks of an ended request, so they keep their names."""
        engine = Engine(lazy=True, gpu_blocks=12)
        request, _ = engine.start("a", TEXT, filled=FILLED)
        unfilled = engine.tables["a"][1]
        engine.finish(request)
        meta = engine.idle()
        assert len(meta.store_gpu_blocks) > 2
        engine.report(meta, unfilled={unfilled})
        for _ in range(4):
            engine.report(engine.idle())
        assert engine.held(request) == [0]
        engine.check_nothing_is_held()

    def test_they_are_stored_once_somebody_has_filled_them_anew(self) -> None:
        engine = Engine(lazy=True, gpu_blocks=12)
        request, _ = engine.start("a", TEXT, filled=FILLED)
        engine.report(unfilled={engine.tables["a"][0]})
        request.num_computed_tokens = 0
        engine.go_on(request, 40)
        engine.finish(request)
        for _ in range(4):
            engine.report(engine.idle())
        assert engine.held(request) == list(range(10))
        engine.check_nothing_is_held()
