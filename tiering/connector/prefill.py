"""Speed of the engine's prefill, measured by the tokens and the durations of its steps.

A step begins when the engine's scheduler has built it, or when the step before it has ended, if that is
later: with asynchronous scheduling, a step is built while another one runs. A step ends when the engine reports it.
The first token of a request is there when the step ends that computes the last token of its prompt.

Until a step with a prompt has ended, a speed is assumed (:data:`ASSUMED_SPEED`), or that of an earlier engine counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiering.api.hints import has_hints
from tiering.api.manager import OffloadingManager
from tiering.api.request import ReqContext
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from tiering.connector.groups import OffloadGroup
from tiering.connector.metadata import ReqId
from tiering.connector.protocols import EngineRequest, SchedulerOutput
from tiering.runtime.linear_cost import LinearCost
from tiering.runtime.shortest import Shortest
from tiering.runtime.time_share import TimeShare

ASSUMED_SPEED = 10_000.0
"""Prompt tokens that an engine computes per second as long as none were measured.

For engines from 500 to 50,000 tokens per second, no other value costs a first prompt less in the worst case. A medium
that delivers nothing lets it take 1 + 50,000 / 10,000 = 6 times as long as computing. A load that is cut off at a
twentieth of the time of computing, just before its half has arrived, lets it take 5.5 times as long as the load. That
is the least that any rule can promise, even if it knows the medium: the same load of 5,000 tokens per second takes ten
times as long as computing, or a tenth of it. What an earlier engine has measured replaces the assumption
(:mod:`tiering.manager.kept_speeds`).
"""

HALF_LIFE = 30.0
"""Seconds after which a step has half of its weight in the estimate."""

SHARE_HALF_LIFE = 30.0
"""Seconds after which half of the weight of the share of time that the engine prefills has faded."""

MOST_SHARE = 0.5
"""Largest share that counts: a burst must not make the slowest load look fast."""

LEAST_TOKENS = 32
"""Smallest number of prompt tokens of a step that is measured."""

LEAST_WEIGHT = 0.1
"""Weight of the latest step without a prompt in the estimate of its duration."""

OUTLIER = 1.5
"""Largest quotient of a step's duration and the expected one; a longer step counts as long as that.

One long step among many short ones, by other work on the machine, would let loads look better than they are. The second
of two long steps counts as it is.
"""

OFFSET_SECONDS = 300.0
"""Length of a period of the shortest wait, in seconds."""

MOST_STEPS = 64
"""Largest number of steps that are remembered until the engine reports them."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """The prompt of a request without a first token."""

    ctx: ReqContext
    request: EngineRequest
    tokens: int = 0
    """Tokens that steps compute for the request."""


class PrefillSpeed:
    """Estimate of the time that a prompt token takes, which a manager gets by block and group.

    Args:
        groups: the KV-cache groups.
        manager: chooses between loading and computing.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        manager: OffloadingManager,
        clock: Callable[[], float],
    ) -> None:
        # A few blocks of a window, or one of a state, stand for the whole prefix: they follow the other groups.
        self._tokens = [group.offloaded_block_size if group.is_full else math.inf for group in groups]
        self._manager = manager
        self._clock = clock
        self._steps: deque[tuple[float, int, int, Sequence[_Prompt]]] = deque(maxlen=MOST_STEPS)
        """When each step that has not ended was built, its prompt tokens and prompts, and those that it ends."""
        self._prompts: dict[ReqId, _Prompt] = {}
        self._built = clock()
        """Time at which the latest step was built."""
        self._ended = -math.inf
        self._share = TimeShare(SHARE_HALF_LIFE, MOST_SHARE, clock())
        """Share of the time that steps with prompts take."""
        self._measured = clock()
        """Time at which the last such step had ended."""
        self._alone = self._beside = self._waited = 0.0
        """Latest seconds of such steps, those of further prompts beside them, and the newest of these."""
        self._offset = Shortest(OFFSET_SECONDS, clock())
        """Times since an arrival."""
        self._cost = LinearCost(HALF_LIFE)
        self._was_long = False
        """True if the last step with a prompt was an outlier."""
        self._least, self._few = 0.0, 0
        """Duration of a step with few tokens, which a step with a prompt takes as well, and their number."""
        self._note(1.0 / ASSUMED_SPEED, is_assumed=True)

    def follow(self, request: EngineRequest, ctx: ReqContext, policy: RequestPolicy) -> None:
        """Note the first token of a request once it is there, for the worth of the tiers.

        Requests with hints or limits are left out, because somebody has a plan with their blocks.

        Args:
            request: the engine's request, which is not scheduled yet.
            ctx: the request as the manager knows it.
            policy: limits of the request.
        """
        if (arrival := getattr(request, "arrival_time", None)) is not None and math.isfinite(arrival):
            self.arrived(arrival)
        if policy != DEFAULT_REQUEST_POLICY or has_hints(request):
            return
        self._prompts[ctx.req_id] = _Prompt(ctx, request)
        self._manager.measure_worth(ctx)

    def arrived(self, arrival: float) -> None:
        """Record that the engine takes a request into account that arrived at ``arrival``, on any clock.

        Its wait is what it took longer than the fastest one of the last minutes, which has waited for no other. So the
        clock may be that of an API server on another machine. The engine takes all requests that are there into account
        before it builds a step, so that the wait began after the latest one.
        """
        now = self._clock()
        self._offset.add(now - arrival, now)
        self._waited += min(now - arrival - self._offset.value(now), now - self._built)

    def finished(self, req_id: ReqId) -> None:
        """Follow a request no more, because it has ended."""
        self._prompts.pop(req_id, None)

    def built(self, output: SchedulerOutput) -> None:
        """Record that a step was built; one without tokens computes nothing."""
        scheduled = output.num_scheduled_tokens
        if scheduled:
            # A request that decodes has one token in a step.
            tokens = sum(scheduled.values()) - len(scheduled)
            prompts = sum(count > 1 for count in scheduled.values()) if tokens >= LEAST_TOKENS else 0
            self._built = self._clock()
            self._steps.append((self._built, tokens, prompts, self._ends(scheduled) if self._prompts else ()))

    def _ends(self, scheduled: Mapping[ReqId, int]) -> Sequence[_Prompt]:
        """Return the prompts whose last token a step computes, and follow them no more."""
        ends = []
        for req_id in self._prompts.keys() & scheduled.keys():
            prompt, request = self._prompts[req_id], self._prompts[req_id].request
            prompt.tokens += scheduled[req_id]
            if request.num_computed_tokens + scheduled[req_id] >= request.num_prompt_tokens:
                ends.append(self._prompts.pop(req_id))
        return ends

    def ended(self) -> None:
        """Record that the engine has reported the oldest step, and pass on the estimate if it has changed."""
        if not self._steps:
            return
        now = self._clock()
        built, tokens, prompts, ends = self._steps.popleft()
        seconds, self._ended = now - max(built, self._ended), now
        if tokens < LEAST_TOKENS:
            self._few += 1
            self._least += max(LEAST_WEIGHT, 1.0 / self._few) * (seconds - self._least)
        elif seconds > 0.0:
            self._cost.observe(tokens, self._believed(tokens, seconds), now)
            self._share.add(seconds, now)
            fade, self._measured = 0.5 ** ((now - self._measured) / SHARE_HALF_LIFE), now
            self._alone = self._alone * fade + seconds
            self._beside, self._waited = self._beside * fade + seconds * (prompts - 1) + self._waited, 0.0
            # Other requests take their share of the steps, so that a prompt takes longer than its own tokens do. Where
            # none waits for another one, as with a client that sends one after another, the share is the prompts' own.
            share = self._share.value
            others = min(share / (1.0 - share), self._beside / self._alone)
            self._note(self._cost.per_unit_beside(self._least), others)
        for prompt in ends:
            self._manager.note_first_token(prompt.ctx, prompt.tokens * self._cost.per_unit_beside(self._least))

    def _believed(self, tokens: int, seconds: float) -> float:
        """Return the duration of a step, or a shorter one for an outlier that follows none."""
        cost = self._cost
        most = math.inf if cost.per_unit is None else OUTLIER * (cost.fixed + cost.per_unit * tokens)
        self._was_long = seconds > most and not self._was_long
        return most if self._was_long else seconds

    def _note(self, per_token: float, others: float = 0.0, *, is_assumed: bool = False) -> None:
        per_token *= 1.0 + others
        seconds = [math.inf if size == math.inf else size * per_token for size in self._tokens]
        self._manager.note_compute(seconds, others=others, is_assumed=is_assumed)
