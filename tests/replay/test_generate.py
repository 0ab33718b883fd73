"""The generator: equal seeds give equal traces, in order, with growing prompts and shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from tiering.replay.generate import WORKLOADS, generate
from tiering.replay.trace import TraceRequest


def generated(kind: str, requests: int = 400, seed: int = 0) -> list[TraceRequest]:
    return list(generate({kind: 1.0}, requests, 4.0, 64, seed))


@pytest.mark.parametrize("kind", list(WORKLOADS))
def test_requests_come_in_order_at_about_the_rate_and_repeat_prefixes(kind: str) -> None:
    found = generated(kind, 1500)
    times = [request.time for request in found]
    assert len(found) == 1500
    assert times == sorted(times)
    assert 1.5 < 1500 / times[-1] < 6
    assert all(len(request.hashes) == request.input_tokens // 64 for request in found)
    hashes = np.concatenate([request.hashes for request in found])
    assert 0.2 < 1 - len(np.unique(hashes)) / len(hashes) < 1
    assert all(len(np.unique(request.hashes)) == len(request.hashes) for request in found)


def test_a_conversation_goes_on_with_the_blocks_of_its_last_turn() -> None:
    found = generated("agents")
    longest = max(found, key=lambda request: len(request.hashes))
    others = [r.hashes for r in found if r is not longest and len(r.hashes)]
    assert sum(np.array_equal(hashes, longest.hashes[: len(hashes)]) for hashes in others) > 3


def test_seeds_decide() -> None:
    one, same, other = generated("chat"), generated("chat"), generated("chat", seed=1)
    assert all(np.array_equal(a.hashes, b.hashes) and a.time == b.time for a, b in zip(one, same, strict=True))
    assert [r.time for r in one] != [r.time for r in other]
