"""The thread that owns the manager behind vLLM's own tiering, and copies from and to vLLM's rows.

vLLM may call a tier from several threads, must not wait for it, and waits in ``drain_jobs`` until no transfer touches
vLLM's rows. All calls are therefore messages to one thread, and every job is a copy in memory: a store copies vLLM's
rows into rows of the manager's primary tier, from where they cascade to the slower tiers. A lookup promotes blocks into
such rows, and is answered with True when a block has arrived and was verified; the load copies it. No medium ever
touches vLLM's rows, so that a medium that hangs holds up none of vLLM's jobs.

The states of a block that a request looks up, as the request's dictionary of answers shows them::

    (absent) --lookup--> None --promoted--> True --load--> (absent)
                          |                   '--the row was evicted before--> False
                          '--not held, failed, overdue--> False

Nothing here imports vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import PRIMARY_TIER, OffloadKey, get_offload_group_idx
from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.engines.mailbox import IDLE_SLEEP, PART_BYTES, ROOM_PATIENCE, ManagerMailbox
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.waiting import SILENT_SLEEP
from tiering.secondary.contract import JobResult, TransferJob

logger = logging.getLogger("kv_tiering.vllm")

Answers = dict[OffloadKey, bool | None]
"""A request's answers: True if a block can be loaded now, False for a miss, None if undecided."""


@dataclass(slots=True, eq=False)
class _Lookups:
    """The lookups of one request."""

    ctx: ReqContext
    answers: Answers
    runs: list[Sequence[OffloadKey]] = field(default_factory=list)
    """Blocks without an answer: consecutive blocks of one group each, in the order of the lookups."""
    ready: dict[OffloadKey, int] = field(default_factory=dict)
    """Blocks that can be loaded and were not, oldest first, with the step of the hit; each holds a row."""
    is_new: bool = False
    """True if a run was added, or rows became free, since the last search."""


@dataclass(slots=True, eq=False)
class _Copying:
    """A job, and how far it has come."""

    job: TransferJob
    began: float
    """Time of submission, in monotonic seconds."""
    position: int = 0
    """Number of keys that were copied or failed."""
    done: list[OffloadKey] = field(default_factory=list)
    """Keys that have succeeded."""
    bytes: int = 0
    """Bytes that were copied."""


class ManagerThread(ManagerMailbox):
    """The thread with the manager, and the mailbox in front of it.

    Any thread may call the public methods. Only :meth:`drain` and :meth:`stop` wait.

    Args:
        manager: the manager of the stack; the thread owns it from :meth:`start` on.
        rows: vLLM's rows, of shape (rows, bytes).
        window: largest number of rows that one request holds or waits for; a longer prefix is loaded in parts.
        patience: seconds for which :meth:`stop` waits for the thread: more than the manager's own deadline.
        prefix_groups: the groups whose blocks vLLM looks up from the first one on and uses up to the first miss.
        reads_events: True if :attr:`events` are taken.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        rows: NDArray[np.uint8],
        *,
        window: int,
        patience: float,
        prefix_groups: Collection[int] = (),
        reads_events: bool = False,
    ) -> None:
        on_events = self._take_events if reads_events else None
        super().__init__(manager, "vLLM's own tiering", logger, patience=patience, on_events=on_events)
        self.results: deque[JobResult] = deque()
        """Results of the jobs that have ended; the reader removes them."""
        self.events: deque[OffloadingEvent] = deque()
        """Events of the secondary tiers, in order; the reader removes them."""
        self._theirs: NDArray[np.uint8] | None = rows
        self._bytes = int(rows.shape[1])
        self._ours: NDArray[np.uint8] | None = np.asarray(manager.primary_tier.get_kv_memoryview())
        self._readable = manager.primary_tier.readable
        self._part = max(1, min(PART_BYTES // self._bytes, manager.primary_tier.num_rows // 8))
        self._window = window
        self._prefix_groups = frozenset(prefix_groups)
        self._lookups: dict[str, _Lookups] = {}
        self._waiting: dict[str, _Lookups] = {}
        self._loads: deque[_Copying] = deque()
        self._stores: deque[_Copying | ReqContext] = deque()
        self._steps = 0  # of vLLM, with undecided lookups

    # ------------------------------------------------------------------------------------------- messages, any thread

    def begin(self, ctx: ReqContext) -> Answers:
        """Begin a request, and return its dictionary of answers.

        The caller adds each block that is looked up with the value None, and passes it to :meth:`look_up` once.
        """
        answers: Answers = {}
        self._mailbox.put((self._begin, (ctx, answers)))
        return answers

    def look_up(self, req_id: str, keys: Sequence[OffloadKey]) -> None:
        """Find out which of ``keys`` can be loaded; the request's answers change."""
        self._mailbox.put((self._look_up, (req_id, keys)))

    def end_step(self, req_ids: Collection[str]) -> None:
        """End a step of vLLM in which lookups of the requests ``req_ids`` were undecided, after its loads."""
        self._steps += 1
        self._mailbox.put((self._step_ended, (self._steps, req_ids)))

    def submit(self, job: TransferJob) -> None:
        """Copy the blocks of a job: into rows of the manager for a store, into vLLM's rows for a load."""
        self._mailbox.put((self._submit, (job,)))

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Make blocks recent in all tiers."""
        self._mailbox.put((self.manager.touch, (keys, ctx)))

    def finish(self, ctx: ReqContext) -> None:
        """End a request, once its stores have ended."""
        self._mailbox.put((self._finish, (ctx,)))

    def drain(self) -> None:
        """Fail all jobs that have not begun, reset the tiers, and return when vLLM's rows are untouched.

        vLLM drains its tiers when its cache is reset, and at no other time.
        """
        done = threading.Event()
        self._mailbox.put((self._drain, (done,)))
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    # ------------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> float:
        copied = self._copy_part()
        self._answer()
        if copied or self._loads:
            return 0.0
        return self._longest if self._waiting or self._stores else IDLE_SLEEP

    def _take_events(self, events: Sequence[OffloadingEvent]) -> None:
        self.events.extend(event for event in events if event.tier != PRIMARY_TIER)

    def _end_all(self) -> None:
        self._fail_jobs()
        self._waiting.clear()
        for lookups in self._lookups.values():
            lookups.answers.update(dict.fromkeys(lookups.answers, False))

    # ---------------------------------------------------------------------------------------------------------- lookups

    def _begin(self, ctx: ReqContext, answers: Answers) -> None:
        self._lookups[ctx.req_id] = _Lookups(ctx, answers)
        if not self._failed:
            self.manager.on_new_request(ctx)

    def _look_up(self, req_id: str, keys: Sequence[OffloadKey]) -> None:
        if (lookups := self._lookups.get(req_id)) is None:
            return
        if self._failed:
            lookups.answers.update(dict.fromkeys(keys, False))
            return
        lookups.runs += [list(run) for _, run in groupby(keys, get_offload_group_idx)]
        self._search_again(lookups)

    def _search_again(self, lookups: _Lookups) -> None:
        if lookups.runs:
            lookups.is_new = True
            self._waiting[lookups.ctx.req_id] = lookups

    def _answer(self) -> None:
        """Answer the lookups that are decided now."""
        for lookups in list(self._waiting.values()):
            if lookups.is_new or not self.manager.still_pending(lookups.ctx):
                lookups.is_new = False
                self._search(lookups)
                if not lookups.runs:
                    del self._waiting[lookups.ctx.req_id]

    def _search(self, lookups: _Lookups) -> None:
        """Answer what is known of a request's runs, as far as its window of rows reaches."""
        left: list[Sequence[OffloadKey]] = []
        room = self._window - len(lookups.ready)
        for run in lookups.runs:
            undecided = run
            if room > 0:
                is_prefix = get_offload_group_idx(run[0]) in self._prefix_groups
                undecided = (self._search_prefix if is_prefix else self._search_each)(lookups, run, room)
                room -= len(run)
            if undecided:
                left.append(undecided)
        lookups.runs = left

    def _search_prefix(self, lookups: _Lookups, run: Sequence[OffloadKey], room: int) -> Sequence[OffloadKey]:
        """Answer for blocks that are of use up to the first miss, and return those that are undecided."""
        keys = run[:room]
        match = self.manager.match_prefix(keys, lookups.ctx)
        ready = self._readable.leading(keys)
        self._hit(lookups, keys[:ready])
        if match.pending or ready == len(keys):
            return run[ready:]
        lookups.answers.update(dict.fromkeys(run[ready:], False))
        return ()

    def _search_each(self, lookups: _Lookups, run: Sequence[OffloadKey], room: int) -> Sequence[OffloadKey]:
        """Answer for blocks that are of use one by one, and return those that are undecided."""
        keys = run[:room]
        found = [self.manager.lookup(key, lookups.ctx) for key in keys]
        self._hit(lookups, [key for key, held in zip(keys, found, strict=True) if held])
        lookups.answers.update((key, False) for key, held in zip(keys, found, strict=True) if held is False)
        return [*(key for key, held in zip(keys, found, strict=True) if held is None), *run[len(keys) :]]

    def _hit(self, lookups: _Lookups, keys: Sequence[OffloadKey]) -> None:
        if keys:
            lookups.ready.update(dict.fromkeys(keys, self._steps))
            lookups.answers.update(dict.fromkeys(keys, True))

    def _step_ended(self, step: int, req_ids: Collection[str]) -> None:
        """Give up the rows of hits that vLLM did not load in a whole step.

        Its CPU tier has them for another request; their rows would hold up the other lookups of the prompt.
        """
        loading = {copying.job.req_context.req_id for copying in self._loads}
        for lookups in filter(None, map(self._waiting.get, set(req_ids).difference(loading))):
            left = [key for key, at in lookups.ready.items() if step >= at + 2]
            deque(map(lookups.ready.pop, left), maxlen=0)
            if held := [key for key in left if key in self._readable]:
                self.manager.prepare_load(held, lookups.ctx)
                self.manager.complete_load(held, lookups.ctx)
            if left:
                self._search_again(lookups)

    def _finish(self, ctx: ReqContext) -> None:
        self._lookups.pop(ctx.req_id, None)
        self._waiting.pop(ctx.req_id, None)
        if not self._failed:
            self._stores.append(ctx)

    def _end_request(self, ctx: ReqContext) -> None:
        """End a request whose stores have ended, unless another one of its name has begun."""
        if not self._failed and ctx.req_id not in self._lookups:
            self.manager.on_request_finished(ctx)

    # ----------------------------------------------------------------------------------------------------------- copies

    def _submit(self, job: TransferJob) -> None:
        copying = _Copying(job, time.monotonic())
        if self._failed:
            self._end(copying)
        elif job.is_promotion:
            self._loads.append(copying)
        else:
            self._stores.append(copying)

    def _copy_part(self) -> bool:
        """Copy a part of the oldest job, loads first, and return True if anything was copied or has ended."""
        if self._loads:
            copying = self._loads[0]
            self._load_part(copying)
            if copying.position == len(copying.job.keys):
                self._end(self._loads.popleft())
            return True
        while self._stores and isinstance(ctx := self._stores[0], ReqContext):
            self._stores.popleft()
            self._end_request(ctx)
        if not self._stores:
            return False
        waiting = self._stores[0]
        if not isinstance(waiting, _Copying) or not self._store_part(waiting):
            return False
        if waiting.position == len(waiting.job.keys):
            self._stores.popleft()
            self._end(waiting)
        return True

    def _load_part(self, copying: _Copying) -> None:
        job, start = copying.job, copying.position
        copying.position = min(len(job.keys), start + self._part)
        keys = job.keys[start : copying.position]
        good = [number for number, key in enumerate(keys, start) if key in self._readable]
        chosen = [job.keys[number] for number in good]
        if chosen:
            spec = self.manager.prepare_load(chosen, job.req_context)
            try:
                self._copy(spec.block_ids, job.block_ids[good], load=True)
            finally:
                self.manager.complete_load(chosen, job.req_context)
            copying.done += chosen
            copying.bytes += len(chosen) * self._bytes
        if (lookups := self._lookups.get(job.req_context.req_id)) is not None:
            lookups.answers.update(dict.fromkeys(set(keys).difference(chosen), False))
            deque(map(lookups.ready.pop, keys, repeat(None)), maxlen=0)
            self._search_again(lookups)

    def _store_part(self, copying: _Copying) -> bool:
        """Copy a part of a store, and return True, or False if there is no room yet."""
        job, start = copying.job, copying.position
        keys = job.keys[start : start + self._part]
        is_last = time.monotonic() >= copying.began + ROOM_PATIENCE
        output = self.manager.prepare_store(keys, job.req_context, is_last=is_last)
        if output is None and not is_last:
            return False
        copying.position = start + len(keys)
        if output is None:
            return True
        if new := output.keys_to_store:
            row_of = dict(zip(keys, job.block_ids[start : copying.position], strict=True))
            copied = False
            try:
                self._copy(output.store_spec.block_ids, [row_of[key] for key in new], load=False)
                copied = True
            finally:
                self.manager.complete_store(new, job.req_context, copied)
            copying.bytes += len(new) * self._bytes
        copying.done += keys
        return True

    def _copy(self, ours: Sequence[int] | NDArray[Any], theirs: Sequence[int] | NDArray[Any], *, load: bool) -> None:
        if self._ours is None or self._theirs is None:  # the thread has ended its work
            raise RuntimeError("a copy after the stop")
        width = self._bytes
        for our_row, their_row in zip(ours, theirs, strict=True):
            if load:
                np.copyto(self._theirs[their_row], self._ours[our_row, :width])
            else:
                np.copyto(self._ours[our_row, :width], self._theirs[their_row])

    def _end(self, copying: _Copying) -> None:
        job, done = copying.job, copying.done
        success = len(done) == len(job.keys)
        seconds = time.monotonic() - copying.began
        self.results.append(JobResult(job.job_id, success, None if success else tuple(done), copying.bytes, seconds))

    def _fail_jobs(self) -> None:
        """End all jobs with what they have copied so far, and all requests that wait behind stores."""
        while self._loads:
            self._end(self._loads.popleft())
        while self._stores:
            waiting = self._stores.popleft()
            if isinstance(waiting, _Copying):
                self._end(waiting)
            else:
                self._end_request(waiting)

    # ------------------------------------------------------------------------------------------------------ reset, stop

    def _drain(self, done: threading.Event) -> None:
        try:
            self._fail_jobs()
            for lookups in self._lookups.values():
                lookups.runs = []
                lookups.ready.clear()
            self._waiting.clear()
            if not self._failed:
                self.manager.reset_cache()
        finally:
            done.set()

    def _stop(self) -> None:
        self._ended = True
        try:
            while not self._failed and (self._loads or self._stores):
                if not self._copy_part():
                    self.manager.on_schedule_end()
                    time.sleep(SILENT_SLEEP)
        finally:
            self._theirs = self._ours = None
            self._fail_jobs()
            self.manager.shutdown()
