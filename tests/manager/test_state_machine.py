"""The manager against a model, in random order: a reader never gets another block than its own.

Rows have real content: (key number, epoch). Every writer scribbles over its rows when it may begin to write, and puts
the right content there when it succeeds. Every reader checks the content at its start and at its end. Each reset
begins a new epoch, and reads must return content of the current one. The model also knows the writer and the readers of
each row, so that a row never has both.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiering.api.hints import KeptBlocks
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.manager import early
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.news import News
from tiering.secondary.contract import TransferJob
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

ROWS = 12
UNIVERSE = 24
KEYS = keys_of(*range(UNIVERSE))
NUMBER = {key: number for number, key in enumerate(KEYS)}
GARBAGE = 255

prefixes = st.builds(
    lambda start, length: KEYS[start : start + length], st.integers(0, UNIVERSE - 1), st.integers(1, 6)
)


choices = st.integers(0, 2**16)


class WritingTier(FakeTier):
    """A fake tier that scribbles over the rows of a load as soon as it may touch them."""

    news: News
    buffer: np.ndarray
    contents: dict[bytes, int]
    read: dict[int, dict[bytes, int]]

    def submit_load(self, job: TransferJob) -> None:
        super().submit_load(job)
        self.buffer[job.block_ids] = GARBAGE
        self.read[job.job_id] = {key: self.contents[key] for key in job.keys if key in self.contents}


class ManagerMachine(RuleBasedStateMachine):
    """The state machine that the module describes."""

    first_tier: type[WritingTier] = WritingTier
    """Class of the faster tier."""
    second_tier: type[WritingTier] = WritingTier
    """Class of the slower tier."""
    pause = 0.0
    """Seconds between the last steps."""

    @initialize(policy=st.sampled_from(["lru", "arc"]), wants_all=st.booleans(), keep=st.booleans())
    def start(self, policy: str, wants_all: bool, keep: bool) -> None:
        self.clock = FakeClock()
        self.news = News()
        self.buffer = np.full((ROWS, 2), GARBAGE, np.uint8)
        self.keep = keep
        self.tiers = [
            self.first_tier(
                "fast",
                load_deadline=5.0,
                primary_share=0.5,
                policy=OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL,
            ),
            self.second_tier("slow", load_deadline=9.0, primary_share=0.75),
        ]
        for tier in self.tiers:
            tier.buffer = self.buffer
            tier.contents = {}
            tier.read = {}
            tier.allowance = 3
            tier.news = self.news
        primary = CPUPrimaryTierOffloadingManager(self.buffer.data, policy)
        self.manager = TieringOffloadingManager(
            primary,
            self.tiers,
            enable_events=True,
            clock=self.clock,
            promotion_share=0.6,
            reservation_deadline=20.0,
            keep_secondary=keep,
            news=self.news,
        )
        self.primary = primary
        self.epoch = 0
        self.requests: dict[str, ReqContext] = {}
        self.finished: set[str] = set()
        self.serial = 0
        self.writes: list[tuple[ReqContext, list[bytes], np.ndarray, int]] = []
        self.reads: list[tuple[ReqContext, list[bytes], np.ndarray, np.ndarray]] = []
        for _ in range(3):
            self.new_request()

    # ------------------------------------------------------------------------------------------------------------ model

    def _fill(self, keys: list[bytes], rows: np.ndarray, epoch: int) -> None:
        self.buffer[rows, 0] = [NUMBER[key] for key in keys]
        self.buffer[rows, 1] = epoch

    def _request(self, choice: int) -> ReqContext:
        return self.requests[sorted(self.requests)[choice % len(self.requests)]]

    # ------------------------------------------------------------------------------------------------------------ rules

    @rule()
    def new_request(self) -> None:
        self.serial += 1
        ctx = ReqContext(f"r{self.serial}")
        self.requests[ctx.req_id] = ctx
        self.manager.on_new_request(ctx)

    @precondition(lambda self: self.requests)
    @rule(choice=choices)
    def finish_request(self, choice: int) -> None:
        self.manager.on_request_finished(self.requests.pop(self._request(choice).req_id))

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes, wait=st.sampled_from([0.0, 6.0, 12.0]), success=st.booleans())
    def finish_with_hints(self, choice: int, keys: list[bytes], wait: float, success: bool) -> None:
        """A request ends and keeps blocks for a time, or releases them (time 0)."""
        ctx = self.requests.pop(self._request(choice).req_id)
        kept = [KeptBlocks(keys, wait, 0.25, success, is_own=not success and choice % 2 == 1)] if wait else []
        self.manager.on_request_finished(ctx, () if wait else keys, kept)

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes)
    def joins_the_queue(self, choice: int, keys: list[bytes]) -> None:
        self.manager.promote_early(keys, self._request(choice))

    @rule(choice=choices, keys=prefixes, wait=st.sampled_from([0.0, 6.0, 12.0]))
    def prefetch(self, choice: int, keys: list[bytes], wait: float) -> None:
        """Each of two tenants may prefetch two blocks per second."""
        self.manager.prefetch(keys, bytes([choice % 2]), 4.0, wait)

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes)
    def look_up(self, choice: int, keys: list[bytes]) -> None:
        ctx = self._request(choice)
        match = self.manager.match_prefix(keys, ctx)
        answers = [self.manager.lookup(key, ctx) for key in keys[: match.hits]]
        assert False not in answers
        assert match.pending or None not in answers
        for key, answer in zip(keys, answers, strict=False):
            assert (key in self.primary.readable) is (answer is True)

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes)
    def prepare_store(self, choice: int, keys: list[bytes]) -> None:
        ctx = self._request(choice)
        before = (dict(self.primary.readable), dict(self.primary.pending))
        output = self.manager.prepare_store(keys, ctx)
        if output is None:
            assert before[0] == {key: row for key, row in self.primary.readable.items() if key in before[0]}
            return
        assert not set(output.evicted_keys) & set(keys)
        if output.keys_to_store:
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            rows = output.store_spec.block_ids
            self._assert_unused(rows)
            self.buffer[rows] = GARBAGE
            self.writes.append((ctx, output.keys_to_store, rows, self.epoch))

    @precondition(lambda self: self.writes)
    @rule(choice=choices, success=st.booleans())
    def complete_store(self, choice: int, success: bool) -> None:
        ctx, keys, rows, epoch = self.writes.pop(choice % len(self.writes))
        if success:
            self._fill(keys, rows, epoch)
        self.manager.complete_store(keys, ctx, success)

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes)
    def prepare_load(self, choice: int, keys: list[bytes]) -> None:
        ctx = self._request(choice)
        readable = [key for key in keys if key in self.primary.readable]
        if readable:
            spec = self.manager.prepare_load(readable, ctx)
            assert isinstance(spec, CPULoadStoreSpec)
            rows = spec.block_ids
            epochs = self.buffer[rows, 1].copy()
            if not self.keep:
                assert (epochs == self.epoch).all()
            assert (self.buffer[rows, 0] == [NUMBER[key] for key in readable]).all()
            self.reads.append((ctx, readable, rows, epochs))

    @precondition(lambda self: self.reads)
    @rule(choice=choices)
    def complete_load(self, choice: int) -> None:
        chosen = self.reads[choice % len(self.reads)][0]
        oldest = next(number for number, read in enumerate(self.reads) if read[0] is chosen)
        ctx, keys, rows, epochs = self.reads.pop(oldest)  # loads of one request end in their order
        assert self.buffer[rows, 0].tolist() == [NUMBER[key] for key in keys]
        assert (self.buffer[rows, 1] == epochs).all()
        self.manager.complete_load(keys, ctx)

    @precondition(lambda self: self.requests)
    @rule(choice=choices, keys=prefixes)
    def touch(self, choice: int, keys: list[bytes]) -> None:
        self.manager.touch(keys, self._request(choice))

    @rule()
    def end_step(self) -> None:
        self.manager.on_schedule_end()

    @rule(seconds=st.sampled_from([1.0, 4.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(choice=choices, tier=st.integers(0, 1), how=st.sampled_from(["success", "failure", "partial"]))
    def tier_ends_a_job(self, choice: int, tier: int, how: str) -> None:
        medium = self.tiers[tier]
        jobs = [*medium.loads, *medium.stores]
        if not jobs:
            return
        job: TransferJob = jobs[choice % len(jobs)]
        keys = list(job.keys)
        done = keys if how == "success" else [] if how == "failure" else keys[::2]
        row_of = dict(zip(job.keys, job.block_ids.tolist(), strict=True))
        if job.is_promotion:
            contents = medium.read.pop(job.job_id)
            done = [key for key in done if key in contents]
            for key in done:
                self._fill([key], np.array([row_of[key]]), contents[key])
        for key in () if job.is_promotion else done:
            row = row_of[key]
            assert self.buffer[row, 0] == NUMBER[key]
            if self.buffer[row, 1] == self.epoch or self.keep:
                medium.contents[key] = int(self.buffer[row, 1])
                medium.held.add(key)
        held = set(medium.held)
        medium.finish(job, how == "success" and len(done) == len(job.keys), done)
        medium.held &= held
        if not job.is_promotion and not self.keep:
            medium.held = {key for key in medium.held if medium.contents.get(key) == self.epoch}

    @rule(tier=st.integers(0, 1), allowance=st.sampled_from([0, 1, 2, 3, 6, None]))
    def tier_changes_its_credit(self, tier: int, allowance: int | None) -> None:
        self.tiers[tier].allowance = allowance

    @rule(tier=st.integers(0, 1), keys=prefixes)
    def tier_gains_blocks(self, tier: int, keys: list[bytes]) -> None:
        """Another engine has stored these blocks in the tier."""
        self.tiers[tier].held.update(keys)
        self.tiers[tier].contents.update(dict.fromkeys(keys, self.epoch))

    @precondition(lambda self: self.requests)
    @rule(
        choice=choices,
        tier=st.integers(0, 1),
        keys=prefixes,
        wait=st.sampled_from([0.0, 0.0, 6.0, 12.0]),
        arrive=st.booleans(),
    )
    def promote(self, choice: int, tier: int, keys: list[bytes], wait: float, arrive: bool) -> None:
        """Run a whole promotion in one rule, because random single rules rarely complete one."""
        ctx = self._request(choice)
        self.tier_gains_blocks(tier, keys)
        self.manager.match_prefix(keys, ctx)
        self.manager.on_schedule_end()
        self.clock.advance(wait)
        if wait:
            self.manager.on_schedule_end()
        if arrive:
            for job in list(self.tiers[tier].loads):
                self._end_load(self.tiers[tier], job)
            self.manager.on_schedule_end()

    def _end_load(self, medium: WritingTier, job: TransferJob) -> None:
        contents = medium.read.pop(job.job_id)
        done = list(contents)
        for key, row in zip(job.keys, job.block_ids.tolist(), strict=True):
            if key in contents:
                self._fill([key], np.array([row]), contents[key])
        medium.finish(job, len(done) == len(job.keys), done)

    @rule(tier=st.integers(0, 1), keys=prefixes)
    def tier_loses_blocks(self, tier: int, keys: list[bytes]) -> None:
        self.tiers[tier].held.difference_update(keys)

    @rule(tier=st.integers(0, 1), keys=prefixes)
    def tier_does_not_know_yet(self, tier: int, keys: list[bytes]) -> None:
        self.tiers[tier].unknown = set(keys) - self.tiers[tier].held

    @rule(tier=st.integers(0, 1), keys=prefixes)
    def tier_wants_keys(self, tier: int, keys: list[bytes]) -> None:
        self.tiers[tier].wanted = keys

    @rule(choice=choices)
    def reset_now_and_then(self, choice: int) -> None:
        if choice % 16 == 0:
            self.reset()

    def reset(self) -> None:
        """A load that began before the reset still delivers content of the old epoch."""
        for tier in self.tiers:
            if not self.keep:
                tier.contents.clear()
        self.manager.reset_cache()
        assert not self.primary.readable
        self.epoch += 1

    # ------------------------------------------------------------------------------------------------------- invariants

    def _assert_unused(self, rows: np.ndarray) -> None:
        busy: set[int] = set()
        for _, _, used, _ in [*self.writes, *self.reads]:
            busy.update(used.tolist())
        for tier in self.tiers:
            busy.update(row for job in tier.loads for row in job.block_ids.tolist())
            busy.update(row for job in tier.stores for row in job.block_ids.tolist())
        assert not busy & set(rows.tolist())

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        if not hasattr(self, "primary"):
            return
        primary, counts = self.primary, self.primary.count_rows()
        assert counts.free + len(primary.readable) + len(primary.pending) + counts.quarantined == ROWS
        rows = [*primary.readable.values(), *primary.pending.values()]
        assert len(rows) == len(set(rows))
        read = {row for _, _, rows, _ in self.reads for row in rows.tolist()}
        read.update(row for tier in self.tiers for job in tier.stores for row in job.block_ids.tolist())
        assert counts.evictable <= len(set(primary.readable.values()) - read)

    @invariant()
    def queued_blocks_hold_their_rows(self) -> None:
        if not hasattr(self, "primary"):
            return
        held = set(np.flatnonzero(self.manager._broker._held).tolist())
        named: set[int] = set()
        for state in self.manager._states:
            keys = [key for key in KEYS if key in state.queue]
            assert len(keys) == len(state.queue)
            assert len(keys) <= ROWS
            named.update(self.primary.readable[key] for key in keys)
        assert held <= named
        assert len(held) == self.manager._broker.rows_held
        assert all(self.primary.readers(np.array(sorted(held), np.int64)) > 0)

    @invariant()
    def what_is_readable_is_right(self) -> None:
        if hasattr(self, "primary"):
            for key, row in self.primary.readable.items():
                assert self.buffer[row, 0] == NUMBER[key]
                assert self.keep or self.buffer[row, 1] == self.epoch

    @invariant()
    def kept_rows_stay_within_their_share(self) -> None:
        keeping = self.primary._table.marks.keeping if hasattr(self, "primary") else None
        if keeping is not None:
            for kind in (keeping.retained, keeping.pinned):
                assert kind.rows == np.count_nonzero(kind._until) <= ROWS // 4

    @invariant()
    def reservations_stay_within_their_share(self) -> None:
        if hasattr(self, "primary"):
            assert 0 <= self.manager.get_stats()["manager"]["rows_reserved"] <= ROWS
            written = {key for _, keys, _, epoch in self.writes if epoch == self.epoch for key in keys}
            assert len(self.primary.pending.keys() - written) <= int(0.6 * ROWS)

    def teardown(self) -> None:
        """Check that without users every row is free or evictable."""
        if not hasattr(self, "primary"):
            return
        for ctx, keys, rows, epoch in self.writes:
            self._fill(keys, rows, epoch)
            self.manager.complete_store(keys, ctx)
        for ctx, keys, _, _ in self.reads:
            self.manager.complete_load(keys, ctx)
        for ctx in self.requests.values():
            self.manager.on_request_finished(ctx)
        self.clock.advance(12.0)
        self.manager.on_schedule_end()  # the last prefetches are due
        self.clock.advance(early.PATIENCE)
        for _ in range(4 + len(self.manager._early.waiting)):
            for tier in self.tiers:
                tier.allowance = None
                for job in [*tier.loads, *tier.stores]:
                    tier.finish(job, False)
                tier.wanted = []
            self.clock.advance(self.pause)
            self.manager.on_schedule_end()
        assert not self.manager.has_pending_work()
        assert self.primary.count_rows().free + self.primary.count_rows().evictable == ROWS
        stats = self.manager.get_stats()["manager"]
        assert stats["rows_reserved"] == stats["rows_quarantined"] == stats["jobs_in_flight"] == 0
        self.check_breaches(stats["misreported_jobs"], stats["tiers_out_of_service"])

    def check_breaches(self, misreported: int, out_of_service: int) -> None:
        """Check the counters of breaches of contract."""
        assert misreported == out_of_service == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


WEIGHTS = {
    "new_request": 4, "finish_request": 2, "finish_with_hints": 4, "look_up": 10, "prepare_store": 12,
    "complete_store": 14, "prepare_load": 8, "complete_load": 9,
    "tier_changes_its_credit": 5, "touch": 3, "joins_the_queue": 2, "prefetch": 2, "end_step": 10,
    "time_passes": 1, "tier_ends_a_job": 16,
    "tier_gains_blocks": 2, "promote": 8, "tier_loses_blocks": 1,
    "tier_does_not_know_yet": 1, "tier_wants_keys": 1, "reset_now_and_then": 6,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_long_weighted_walks_over_the_same_rules(seed: int) -> None:
    """These walks find defects with a long history (eviction, expiry, late arrivals) before Hypothesis."""
    rnd = random.Random(seed)
    machine = ManagerMachine()
    machine.start(rnd.choice(["lru", "arc"]), rnd.random() < 0.5, seed % 4 == 3)
    for _ in range(1500):
        name = rnd.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        start = rnd.randrange(UNIVERSE)
        arguments = {
            "choice": rnd.randrange(2**16),
            "keys": KEYS[start : start + rnd.randint(1, 6)],
            "success": rnd.random() < 0.8,
            "seconds": rnd.choice([1.0, 4.0, 25.0]),
            "tier": rnd.randrange(2),
            "how": rnd.choice(["success", "success", "failure", "partial"]),
            "wait": rnd.choice([0.0, 0.0, 6.0, 12.0]),
            "arrive": rnd.random() < 0.7,
            "allowance": rnd.choice([0, 1, 2, 3, 6, None]),
        }
        if (name == "complete_store" and not machine.writes) or (name == "complete_load" and not machine.reads):
            continue
        if name.startswith("finish_") and len(machine.requests) < 3:
            continue
        method = getattr(machine, name)
        code = method.__func__.__code__
        wanted = code.co_varnames[1 : code.co_argcount]
        method(**{word: arguments[word] for word in wanted})
        machine.every_row_is_in_one_place()
        machine.what_is_readable_is_right()
        machine.reservations_stay_within_their_share()
        machine.queued_blocks_hold_their_rows()
        machine.kept_rows_stay_within_their_share()
    stats = machine.manager.get_stats()["manager"]
    machine.teardown()
    assert stats["evicted_blocks"] > 50
    assert stats["promotions_overdue"] > 0
    assert stats["queued_evicted"] > 0
    assert stats["promotions_waited"] > 0
    assert stats["blocks_prefetched"] > 0
    assert stats["blocks_retained"] + stats["blocks_pinned"] > 0
    assert stats["resets"] > 0
