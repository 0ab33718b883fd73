"""The named multiple of a capacity keeps the blocks of the same trace."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from tests.replay.traces import BLOCK_BYTES, BLOCK_TOKENS, request
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.config.stack_file import load_stack
from tiering.explain.causes import MissCause
from tiering.explain.explanation import Span
from tiering.replay import replay
from tiering.replay.misses import ReplayMisses
from tiering.replay.model import ReplayModel
from tiering.replay.trace import TraceRequest

MODEL = ReplayModel(prefill_tokens_per_second=1e6, device_bytes_per_second=10**6 * BLOCK_BYTES)


def shared_prompts(seed: int) -> list[TraceRequest]:
    """Return 120 requests, each with the beginning of one of some prompts, at a time when no other runs."""
    dice = random.Random(seed)
    prompts = [range(1000 * number, 1000 * number + dice.randrange(2, 14)) for number in range(dice.choice((8, 20)))]
    chosen = dice.choices(prompts, [(number + 1) ** -0.6 for number in range(len(prompts))], k=120)
    return [request(100.0 * number, ids[: dice.randrange(1, len(ids) + 1)]) for number, ids in enumerate(chosen)]


def explained(trace: list[TraceRequest], rows: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Span, ...]]:
    """Return the causes of each request of a replay with a CPU tier of some rows."""
    found: dict[str, tuple[Span, ...]] = {}

    class Noted(ReplayMisses):
        def missed(self, ctx: ReqContext, keys: Sequence[OffloadKey], held: int, prompt: int, computed: int) -> None:
            super().missed(ctx, keys, held, prompt, computed)
            explanation = self._explainer.answer(ctx.req_id)
            assert explanation is not None
            assert sum(span.end - span.first for span in explanation.spans) == computed
            found[ctx.req_id] = explanation.spans

    monkeypatch.setattr(replay, "ReplayMisses", Noted)
    stack = load_stack({"primary": {"capacity": rows * BLOCK_BYTES}, "explain": {}})
    replay.Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, MODEL).run(trace)
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_named_multiple_of_the_capacity_keeps_the_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, rows = shared_prompts(seed), random.Random(seed).randrange(20, 50)
    named: dict[str, int] = {}
    for name, spans in explained(trace, rows, monkeypatch).items():
        factors = [span.factor for span in spans if span.cause is MissCause.EVICTED]
        if factors:
            assert None not in factors
            named[name] = math.ceil(round(rows * max(filter(None, factors)), 6))
    assert len(named) > 10
    kept = 0
    sizes = sorted(set(named.values()))
    for enough in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        causes = explained(trace, enough, monkeypatch)
        promised = [name for name, size in named.items() if size <= enough]
        assert [name for name in promised if any(span.factor for span in causes[name])] == []
        kept += sum(not any(span.factor for span in causes[name]) for name in named)
    assert kept < 3 * len(named), "the smallest multiple would do for all"
