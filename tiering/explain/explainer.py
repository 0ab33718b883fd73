"""The explainer of one engine's misses: notes of the scheduler's thread, and conclusions off the step.

On a step, what happened is appended to a queue, by reference: events of tiers, blocks that a tier did not take, and the
keys that a request has to compute. The explainer's thread follows the queue in its order, so that each conclusion rests
on the state of the tiers at the moment of the miss. Blocks are compared by keys only. A key covers the cache salt and
the adapter, so the blocks of other tenants are never known ones.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import MissExplaining
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.masking import shown_name
from tiering.api.misses import LookupOutcome, Unstored
from tiering.explain.causes import OF_A_TIER, MissCause, Reason
from tiering.explain.explanation import Explanation, Span, is_of, summary
from tiering.explain.last_hour import MINUTES, Causes, LastHour, Tokens
from tiering.explain.past_blocks import MOST_SECONDS, TIME_UNIT, PastBlocks, Records
from tiering.explain.past_prompts import NO_PROMPT, PastPrompts, Prompt
from tiering.runtime.forks import inert_in_children

logger = logging.getLogger("kv_tiering.explain")

MAX_WAITING_BLOCKS = 1 << 18
"""Largest number of blocks in the queue, about 20 MB of keys; beyond it, all records start over.

Notes without keys, which count as one block each, are left out beyond twice this number.
"""

MAX_WAITING_TOKENS = 1 << 20
"""Largest number of tokens in the queue, about 40 MB; the tokens of further requests are not examined."""

MAX_OPEN = 1 << 16
"""Largest number of requests that have not begun to compute and are remembered."""

_PIECE = 128
"""Blocks that are processed before other threads may run; that takes about 0.1 ms."""

_CAUSE_UNIT, _TIER_UNIT = 256, 16
"""Units of the numbers that stand for a cause, a tier and a reason."""

Totals = Mapping[tuple[MissCause, str], int]
"""Tokens by cause and name of the tier."""


class Missed(NamedTuple):
    """The blocks that a request computes, as the scheduler's thread sees them when they are allocated."""

    req_id: str
    """Id of the request."""
    prompt: int
    """Tokens of the prompt."""
    filled: int
    """Leading tokens that are in the engine's cache or are being loaded."""
    allowed: int
    """Tokens of the prompt up to which loads are allowed."""
    coverable: int
    """Tokens of the prompt that a hit can cover at most, in whole blocks."""
    keys: Sequence[OffloadKey]
    """Keys of the coverable blocks from the first one on that is not filled."""
    outcome: LookupOutcome | None
    """Result of the lookup of the first of them; None: nothing is known."""
    tokens: Prompt = NO_PROMPT
    """The prompt's tokens, as far as they are to be compared; default: none."""
    refusal: Reason = Reason.PARAMETERS
    """Reason why no load is allowed behind ``allowed``; default: the request's parameters."""


class _Started(NamedTuple):
    req_id: str
    computed: int


class _Ended(NamedTuple):
    req_id: str
    keys: Sequence[OffloadKey]
    tokens: Prompt


_RESET = object()


class Explainer:
    """The causes of one engine's misses.

    The scheduler's thread calls the methods that note something. All others belong to the explainer's thread.

    Args:
        explaining: settings, with the tiers and their capacities.
        block_tokens: tokens of one block of the group that measures hits.
        clock: returns monotonic seconds.
        now: returns seconds since the epoch; default: the system's time.
        pause: lets other threads run; default: gives up the interpreter lock for a moment.
    """

    def __init__(
        self,
        explaining: MissExplaining,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        now: Callable[[], float] = time.time,
        pause: Callable[[], object] = lambda: time.sleep(0),
    ) -> None:
        self._clock = clock
        self._now = now
        self._pause = pause
        self._block_tokens = block_tokens
        self._names = tuple(explaining.capacities)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._capacities = list(explaining.capacities.values())
        self._blocks = PastBlocks(explaining.blocks)
        self._prompts = PastPrompts(explaining.blocks, block_tokens, pause)
        self._since = clock()
        self._evictions = [0] * len(self._names)
        self._queue: deque[Any] = deque()
        self._noted = self._taken = 0
        """Blocks that were appended to the queue, and that were taken from it."""
        self._tokens_noted = self._tokens_taken = 0
        """Tokens that were appended to the queue, and that were taken from it."""
        self._overflown = self._disabled = False
        self._most_requests = explaining.requests
        self._open: dict[str, tuple[Missed, list[Span], float]] = {}
        self._explained: OrderedDict[str, Explanation] = OrderedDict()
        self.sums: Causes = Counter()
        """Tokens by cause, tier and reason since the start."""
        self._hour = LastHour()
        # Only the parent's thread processes notes.
        inert_in_children(self, ("events", "unstored", "missed", "started", "ended", "reset"))

    # ------------------------------------------------------------------------------------------- the scheduler's thread

    @property
    def _is_late(self) -> bool:
        """True while so many blocks wait that no further keys are noted."""
        return self._noted - self._taken > MAX_WAITING_BLOCKS

    def _note(self, note: object, blocks: int, room: int = 1) -> None:
        """Append a note, unless more than ``room`` times the largest number of blocks wait."""
        if self._disabled:
            return
        if self._noted - self._taken > room * MAX_WAITING_BLOCKS:
            self._overflown = True
            return
        if self._overflown:  # what was left out makes all records doubtful
            self._overflown = False
            self._noted += 1
            self._queue.append(_RESET)
        self._noted += blocks + 1
        self._queue.append(note)

    def _bounded(self, prompt: Prompt) -> Prompt:
        """Return a prompt, without its tokens while too many blocks or tokens wait."""
        waiting = len(prompt.tokens)
        if self._is_late or self._tokens_noted - self._tokens_taken + waiting > MAX_WAITING_TOKENS:
            return NO_PROMPT
        self._tokens_noted += waiting
        return prompt._replace(waiting=waiting)

    def events(self, events: Iterable[OffloadingEvent]) -> None:
        """Note events of the tiers, in their order."""
        for event in events:
            self._note(event, len(event.keys))

    def set_capacity(self, tier: str, blocks: int) -> None:
        """Set the capacity of a tier that the engine's stack does not have."""
        if (index := self._index.get(tier)) is not None:
            self._capacities[index] = blocks

    def unstored(self, unstored: Iterable[Unstored]) -> None:
        """Note blocks that tiers did not take."""
        for one in unstored:
            self._note(one, len(one.keys))

    def missed(self, missed: Missed) -> None:
        """Note what a request has to compute; its first call counts."""
        missed = missed._replace(tokens=self._bounded(missed.tokens))
        if self._is_late:
            missed = missed._replace(keys=())  # its blocks are not examined
        self._note(missed, len(missed.keys), room=2)

    def started(self, req_id: str, computed: int) -> None:
        """Note that a request begins to compute behind ``computed`` tokens."""
        self._note(_Started(req_id, computed), 0, room=2)

    def ended(self, req_id: str, keys: Sequence[OffloadKey], tokens: Prompt = NO_PROMPT) -> None:
        """Note that a request has ended, with the keys of all blocks and the tokens that it had."""
        keys = () if self._is_late else keys
        self._note(_Ended(req_id, keys, self._bounded(tokens)), len(keys), room=2)

    def reset(self) -> None:
        """Note that all blocks were dropped, because of a reset: from now on, all are unknown."""
        self._note(_RESET, 0, room=2)

    def disable(self) -> None:
        """Note nothing from now on, because no thread processes the notes."""
        self._disabled = True
        self._queue.clear()

    @property
    def totals(self) -> Totals:
        """Tokens by cause and tier since the start."""
        totals = {(cause, ""): 0 for cause in MissCause if cause not in OF_A_TIER}
        totals |= {(cause, name): 0 for cause in sorted(OF_A_TIER) for name in self._names}
        for (cause, tier, _), tokens in dict(self.sums).items():
            totals[cause, tier] += tokens
        return totals

    # ------------------------------------------------------------------------------------------- the explainer's thread

    def settle(self) -> None:
        """Process all notes so far."""
        for _ in range(len(self._queue)):
            note = self._queue.popleft()
            self._process(note)
            self._taken += 1 + len(getattr(note, "keys", ()))
            if isinstance(note, Missed | _Ended):
                self._tokens_taken += note.tokens.waiting

    def answer(self, req_id: str) -> Explanation | None:
        """Return the explanation of the latest of :meth:`names`; None if there is none."""
        return self._explained.get(next(iter(self.names(req_id)), ""))

    def names(self, req_id: str) -> list[str]:
        """Return the explained requests that a client knows by one id, the latest first.

        There is one for each prompt and choice.
        """
        if req_id in self._explained:
            return [req_id]
        return [name for name in reversed(self._explained) if is_of(name, req_id)]

    def is_waiting(self, req_id: str) -> bool:
        """Return True if a request has not begun to compute."""
        return req_id in self._open or any(is_of(name, req_id) for name in self._open)

    def latest(self, count: int) -> list[str]:
        """Return the ids of the latest requests with an explanation, the latest first."""
        return list(islice(reversed(self._explained), count))

    def last(self, minutes: int = MINUTES) -> Tokens:
        """Return the tokens of the requests that began in the last minutes."""
        return self._hour.last(self._minute, minutes)

    @property
    def requests(self) -> int:
        """Number of requests with an explanation."""
        return len(self._explained)

    @property
    def followed_seconds(self) -> float:
        """Seconds for which blocks have been followed."""
        return self._clock() - self._since

    def _process(self, note: object) -> None:
        if self.followed_seconds > MOST_SECONDS or note is _RESET:
            self._blocks.clear()
            self._prompts.clear()
            self._since = self._clock()
        if isinstance(note, OffloadingEvent):
            self._follow(note)
        elif isinstance(note, Unstored):
            tier = self._index.get(note.tier)
            if tier is not None:
                for hashes in self._pieces(note.refused()):
                    self._blocks.unstored(hashes, tier, self._time)
        elif isinstance(note, Missed):
            if note.req_id not in self._open:
                self._open[note.req_id] = (note, self._conclude(note), self._now())
                if len(self._open) > MAX_OPEN:
                    del self._open[next(iter(self._open))]
        elif isinstance(note, _Started):
            self._begin(note)
        elif isinstance(note, _Ended):
            self._open.pop(note.req_id, None)
            for hashes in self._pieces(note.keys):
                self._blocks.seen(hashes, self._time)
            if digest := self._prompts.digest(note.tokens):
                self._prompts.add(digest)

    @property
    def _minute(self) -> int:
        return int(self._clock() // 60)

    @property
    def _time(self) -> int:
        return int((self._clock() - self._since) / TIME_UNIT)

    def _pieces(self, keys: Sequence[OffloadKey]) -> Iterable[NDArray[np.uint64]]:
        """Yield the hashes of some keys at a time, after a moment in which other threads may run."""
        for at in range(0, len(keys), _PIECE):
            self._pause()
            yield self._blocks.hashes(keys[at : at + _PIECE])

    def _follow(self, event: OffloadingEvent) -> None:
        tier = self._index.get(event.tier)
        if tier is None:
            return
        self._evictions[tier] += event.others
        for hashes in self._pieces(event.keys):
            if not event.removed:
                self._blocks.stored(hashes, tier, self._time)
            elif event.evicted:
                self._blocks.evicted(hashes, tier, self._time, self._evictions[tier])
                self._evictions[tier] += len(hashes)
            else:
                self._blocks.lost(hashes, tier, self._time)

    # ------------------------------------------------------------------------------------------------------ conclusions

    def _conclude(self, missed: Missed) -> list[Span]:
        """Return the causes of the tokens that a request computes, in the order of the prompt."""
        size = self._block_tokens
        first = missed.filled // size
        spans: list[Span] = []
        found = [(hashes, self._blocks.find(hashes)) for hashes in self._pieces(missed.keys)]
        if found:
            records = Records.joined([records for _, records in found])
            codes = self._codes(missed, records, first)
            parting = self._compare_tokens(codes, missed, first)
            borders = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
            for start, end in pairwise(borders):
                span = self._span(int(codes[start]), records, start, end, first * size)
                spans.append(span._replace(token=parting) if span.cause is MissCause.DIVERGED else span)
            for hashes, _ in found:
                self._blocks.seen(hashes, self._time)
        end = (first + len(missed.keys)) * size
        if end < missed.coverable:
            if missed.allowed > end:
                spans.append(Span(end, missed.coverable, MissCause.UNEXAMINED))
            else:
                spans.append(Span(end, missed.coverable, MissCause.NOT_ALLOWED, reason=missed.refusal))
        spans.append(Span(max(end, missed.coverable), missed.prompt, MissCause.REMAINDER))
        return spans

    def _codes(self, missed: Missed, records: Records, first: int) -> NDArray[np.int64]:
        """Return a number for the cause, the tier and the reason of each missed block.

        Args:
            missed: the blocks.
            records: their records.
            first: position of the first of them in the prompt.
        """
        known, removed, unstored = records.known, records.removed_from, records.unstored_by
        last_known = int(np.flatnonzero(known)[-1]) if known.any() else -1
        alike = first + last_known + 1 > 0
        codes = np.full(len(known), _code(MissCause.DIVERGED if alike else MissCause.NEW), np.int64)
        # A key covers all tokens before it, so that blocks before a known one were seen as well.
        codes[: last_known + 1] = _code(MissCause.UNEXAMINED)
        codes[known] = _code(MissCause.UNSTORED)
        gone = known & (removed > 0)
        cause = np.where(records.lost, int(MissCause.LOST), int(MissCause.EVICTED)) * _CAUSE_UNIT
        codes[gone] = (cause + (removed.astype(np.int64) - 1) * _TIER_UNIT)[gone]
        declined = known & (unstored > 0)
        codes[declined] = _code(MissCause.UNSTORED) + (unstored.astype(np.int64)[declined] - 1) * _TIER_UNIT
        self._add_held(codes, missed.outcome, records.held)
        allowed = max(0, missed.allowed // self._block_tokens - first)
        codes[allowed:] = _code(MissCause.NOT_ALLOWED) + int(missed.refusal)
        return codes

    def _compare_tokens(self, codes: NDArray[np.int64], missed: Missed, first: int) -> int | None:
        """Set the numbers of blocks whose tokens alone are known, and return the first new token.

        Args:
            codes: a number for each missed block; changed in place.
            missed: the blocks.
            first: position of the first of them in the prompt.
        """
        unknown = np.flatnonzero((codes == _code(MissCause.DIVERGED)) | (codes == _code(MissCause.NEW)))
        digest = self._prompts.digest(missed.tokens) if len(unknown) else None
        if digest is None:
            return None
        start, end = int(unknown[0]), int(unknown[-1]) + 1
        own, other = (found[: end - start] for found in self._prompts.adapters(digest, first + start))
        behind = int(np.flatnonzero(own | other)[-1]) + 1 if (own | other).any() else 0
        if not behind:
            return self._prompts.parting(digest, first + start)
        # A hash covers all tokens before it, so that blocks before a known one were seen as well.
        codes[start : start + behind] = _code(MissCause.UNEXAMINED)
        codes[start : start + behind][other[:behind]] = _code(MissCause.OTHER_ADAPTER)
        codes[start + behind : end] = _code(MissCause.DIVERGED)
        return None

    def _add_held(self, codes: NDArray[np.int64], outcome: LookupOutcome | None, held: NDArray[np.uint32]) -> None:
        """Set the numbers of the blocks that a tier holds."""
        if not held.any():
            return
        usable = np.uint32(1)
        if outcome is not None:
            for name, _ in outcome.tiers:
                usable |= np.uint32(1 << self._index.get(name, 0))
        codes[held > 0] = _code(MissCause.NOT_ALLOWED) + int(Reason.PARAMETERS)
        held = held & usable
        lowest = held & (~held + np.uint32(1))
        tiers = np.log2(np.maximum(lowest, 1)).astype(np.int64)
        is_held = held > 0
        gap = len(held) if is_held.all() else int(np.flatnonzero(~is_held)[0])
        base = int(MissCause.UNSERVED) * _CAUSE_UNIT + tiers * _TIER_UNIT
        codes[is_held] = (base + int(Reason.GAP))[is_held]
        if gap:
            reason = self._reason(outcome, self._names[int(tiers[0])], gap)
            codes[:gap] = (base + int(reason))[:gap]

    @staticmethod
    def _reason(outcome: LookupOutcome | None, tier: str, length: int) -> Reason:
        """Return the reason why a run of blocks was not loaded.

        Args:
            outcome: result of the lookup of its first block.
            tier: fastest tier that holds this block.
            length: number of blocks of the run.
        """
        if outcome is None:
            return Reason.GAP
        if outcome.refused is not None:
            return Reason[outcome.refused.name]
        if tier in outcome.failed:
            return Reason.FAILED
        least = dict(outcome.tiers).get(tier)
        if least is None:  # the CPU tier: its own blocks are always found
            return Reason.GAP
        if tier == outcome.control:
            return Reason.CONTROL
        if tier in outcome.gated:
            return Reason.GATED
        if outcome.cut:
            return Reason.GAP
        return Reason.SHORT if length < least else Reason.UNAVAILABLE

    def _span(self, code: int, records: Records, start: int, end: int, offset: int) -> Span:
        """Return the span of the blocks from ``start`` to ``end``, whose cause is ``code``."""
        cause, rest = divmod(code, _CAUSE_UNIT)
        tier, reason = divmod(rest, _TIER_UNIT)
        kind, size = MissCause(cause), self._block_tokens
        span = Span(offset + start * size, offset + end * size, kind, reason=Reason(reason))
        if kind in OF_A_TIER:
            span = span._replace(tier=self._names[tier])
        if kind in (MissCause.EVICTED, MissCause.LOST):
            now, times = self._time, records.time[start:end]
            ages = (now - int(times.max())) * TIME_UNIT, (now - int(times.min())) * TIME_UNIT
            span = span._replace(ages=ages)
        if kind is MissCause.EVICTED and (capacity := self._capacities[tier]):
            later = (self._evictions[tier] - records.number[start:end].astype(np.int64)) % (1 << 32)
            span = span._replace(factor=-(-100 * (capacity + int(later.max())) // capacity) / 100)  # rounded up
        return span

    # ------------------------------------------------------------------------------------------------------ begin, sums

    def _begin(self, started: _Started) -> None:
        """Fit the conclusions about a request to the tokens that it really computes, and count them."""
        entry = self._open.pop(started.req_id, None)
        if entry is None:
            return
        missed, spans, when = entry
        begin, filled = min(started.computed, missed.prompt), min(missed.filled, missed.prompt)
        final: list[Span] = []
        if begin < filled:
            is_last = filled == missed.prompt and begin == filled - 1
            final.append(Span(begin, filled, MissCause.REMAINDER if is_last else MissCause.LOAD_FAILED))
        for span in spans:
            span = span._replace(first=max(span.first, begin, filled))
            if span.first < span.end:
                final.append(span)
        explanation = Explanation(
            started.req_id, when, missed.prompt, missed.prompt - begin, tuple(final), self.followed_seconds
        )
        self._explained.pop(started.req_id, None)
        self._explained[started.req_id] = explanation
        while len(self._explained) > self._most_requests:
            self._explained.popitem(last=False)
        self._hour.add(self._minute, missed.prompt, final)
        for span in final:
            self.sums[span.cause, span.tier, span.reason] += span.end - span.first
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s computed %s", shown_name(started.req_id), summary(final))


def _code(cause: MissCause) -> int:
    return int(cause) * _CAUSE_UNIT
