"""A generator of traces: conversations, shared system prompts, documents and agents.

A trace is made of sessions. A session begins with a shared prefix, asks, and appends the answer and the next question
to its prompt at each turn. All lengths are in tokens. Equal seeds give equal traces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tiering.replay.trace import Hashes, TraceRequest, mixed

MAX_PROMPT = 128 * 1024
"""Length in tokens at which a session ends."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of one kind of session; lengths are medians of log-normal distributions."""

    prefixes: int
    """Number of shared prefixes; their popularity falls as in Zipf's law."""
    prefix_tokens: int
    """Length of a shared prefix."""
    prefix_spread: float
    """Standard deviation of the logarithm of a shared prefix's length."""
    question_tokens: int
    """Tokens that one turn adds to the prompt: a question, or a tool's result."""
    answer_tokens: int
    turns: float
    """Mean number of turns of a session."""
    pause_seconds: float
    """Mean time between the turns of a session."""


WORKLOADS: Mapping[str, Workload] = {
    "chat": Workload(20, 600, 0.5, 120, 350, 5.0, 60.0),
    "system": Workload(50, 2500, 0.6, 300, 200, 1.0, 1.0),
    "documents": Workload(400, 20_000, 0.7, 60, 250, 4.0, 40.0),
    "agents": Workload(12, 6000, 0.4, 900, 180, 18.0, 6.0),
}
"""Kinds of sessions, by name.

Chat has several turns. System has single requests behind shared prompts. Documents are long, and several people ask
about them. Agents have many turns, because their tools answer.
"""

_SPREAD = 0.8
_SESSION_BIT = np.uint64(1 << 63)


@dataclass(slots=True)
class _Session:
    workload: Workload
    prefix: Hashes
    number: int
    tokens: int
    turns_left: int


def generate(
    kinds: Mapping[str, float], requests: int, rate: float, block_tokens: int, seed: int = 0
) -> Iterator[TraceRequest]:
    """Generate requests in the order of their times.

    Args:
        kinds: names in :data:`WORKLOADS` → share of the sessions, above 0; the shares need not add up to 1.
        requests: number of requests.
        rate: mean number of requests per second, above 0.
        block_tokens: tokens of one block; only whole blocks of a prompt are listed.
        seed: seed of all random choices; default 0.
    """
    random = np.random.default_rng(seed)
    names = list(kinds)
    shares = np.array([kinds[name] for name in names])
    shares /= shares.sum()
    turns = float(sum(share * WORKLOADS[name].turns for share, name in zip(shares, names, strict=True)))
    prefixes = {name: _Prefixes(index, WORKLOADS[name], block_tokens, random) for index, name in enumerate(names)}
    waiting: list[tuple[float, int, _Session]] = []
    begins, sessions, done = 0.0, 0, 0
    while done < requests:
        while not waiting or begins <= waiting[0][0]:
            name = names[random.choice(len(names), p=shares)]
            workload = WORKLOADS[name]
            prefix, tokens = prefixes[name].pick(random)
            sessions += 1
            session = _Session(workload, prefix, sessions, tokens, int(random.geometric(1 / workload.turns)))
            heapq.heappush(waiting, (begins, sessions, session))
            begins += random.exponential(turns / rate)
        now, number, session = heapq.heappop(waiting)
        session.tokens += _length(random, session.workload.question_tokens)
        answer = _length(random, session.workload.answer_tokens)
        yield TraceRequest(now, session.tokens, answer, _hashes(session, block_tokens))
        done += 1
        session.tokens += answer
        session.turns_left -= 1
        if session.turns_left > 0 and session.tokens < MAX_PROMPT:
            pause = random.exponential(session.workload.pause_seconds)
            heapq.heappush(waiting, (now + pause, number, session))


class _Prefixes:
    """The shared prefixes of one kind of session."""

    def __init__(self, index: int, workload: Workload, block_tokens: int, random: np.random.Generator) -> None:
        medians = workload.prefix_tokens * np.exp(random.normal(0.0, workload.prefix_spread, workload.prefixes))
        self._tokens = np.clip(medians.astype(np.int64), 1, MAX_PROMPT // 2)
        self._blocks = block_tokens
        self._index = index
        weights = 1.0 / np.arange(1, workload.prefixes + 1)
        self._weights = weights / weights.sum()

    def pick(self, random: np.random.Generator) -> tuple[Hashes, int]:
        """Return the hashes of one prefix's whole blocks, and its length in tokens."""
        chosen = int(random.choice(len(self._weights), p=self._weights))
        tokens = int(self._tokens[chosen])
        start = np.uint64((self._index << 48) + (chosen << 24))
        return mixed(np.arange(tokens // self._blocks, dtype=np.uint64) + start), tokens


def _length(random: np.random.Generator, median: int) -> int:
    return max(1, int(median * np.exp(random.normal(0.0, _SPREAD))))


def _hashes(session: _Session, block_tokens: int) -> Hashes:
    blocks, shared = session.tokens // block_tokens, len(session.prefix)
    own = np.arange(shared, max(blocks, shared), dtype=np.uint64) + np.uint64(session.number << 24)
    return np.concatenate((session.prefix, mixed(own | _SESSION_BIT)))
