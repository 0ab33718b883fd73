"""Prompts whose blocks have planted causes: the explainer must find each cause from what it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from operator import eq

from tiering.api.engine import MissExplaining
from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_STORAGE, OffloadingEvent
from tiering.api.misses import LookupOutcome, Unstored
from tiering.explain.causes import MissCause, Reason
from tiering.explain.explainer import Explainer, Missed
from tiering.explain.explanation import Explanation
from tiering.explain.past_prompts import Prompt
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of

BLOCK = 4
TIERS = ("cpu", "local", "bucket")
SECONDARY = TIERS[1:]
CAPACITIES = {"cpu": 100, "local": 1000, "bucket": 0}
LEAST = (("local", 1), ("bucket", 1))

Planted = tuple[MissCause, str]
"""Cause of a block and the tier that it names."""


def make_explainer(clock: Callable[[], float] | None = None, *, blocks: int = 1 << 14, requests: int = 8) -> Explainer:
    explaining = MissExplaining(CAPACITIES, blocks, requests)
    return Explainer(explaining, BLOCK, clock or FakeClock(), now=lambda: 0.0, pause=lambda: None)


def event(tier: str, *keys: OffloadKey, removed: bool = False, evicted: bool = False) -> OffloadingEvent:
    return OffloadingEvent(list(keys), MEDIUM_STORAGE, LOCAL, tier, removed or evicted, evicted=evicted)


class Walk:
    """One explainer, and requests whose causes are planted.

    Args:
        seed: seed of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.explainer = make_explainer(self.clock)
        self._numbers = count()

    def key(self) -> OffloadKey:
        return self.rng.randbytes(32) + bytes(4)

    def request(self) -> tuple[Explanation, list[Planted]]:
        """Return the explanation of a new request, and the planted cause of each computed token."""
        rng, name = self.rng, f"r{next(self._numbers)}"
        found, known = rng.randrange(3), rng.randrange(8)
        new = rng.randrange(4)
        blocks = [self.planted() for _ in range(known)]
        self._mix([steps for _, _, steps in blocks])
        keys = [key for key, _, _ in blocks] + [self.key() for _ in range(new)]
        causes = [cause for _, cause, _ in blocks]
        causes += [(MissCause.DIVERGED if found + known else MissCause.NEW, "")] * new
        allowed = rng.randrange(len(keys) + 1) if rng.random() < 0.2 else len(keys)
        causes[allowed:] = [(MissCause.NOT_ALLOWED, "")] * (len(keys) - allowed)
        tail = rng.randrange(1, BLOCK)
        prompt = (found + len(keys)) * BLOCK + tail
        prompt_tokens = [rng.randrange(100_000) for _ in range(prompt)]
        if new and rng.random() < 0.4:
            alike, salt, behind = rng.randrange(1, new + 1), rng.choice(["mine", "theirs"]), len(keys) - new
            earlier = Prompt(prompt_tokens[: (found + behind + alike) * BLOCK + rng.randrange(BLOCK)], salt, "other")
            self.explainer.ended("with another adapter", [self.key() for _ in range(alike)], earlier)
            if salt == "mine":
                planted = [(MissCause.OTHER_ADAPTER, "")] * alike + [(MissCause.DIVERGED, "")] * (new - alike)
                causes[behind:allowed] = planted[: max(0, allowed - behind)]
        tokens = [cause for cause in causes for _ in range(BLOCK)] + [(MissCause.REMAINDER, "")] * tail
        failed = rng.randrange(found + 1) if rng.random() < 0.1 else 0
        outcome = LookupOutcome(None, (), LEAST)
        end = prompt - tail
        own = Prompt(prompt_tokens, "mine", "own")
        self.explainer.missed(Missed(name, prompt, found * BLOCK, (found + allowed) * BLOCK, end, keys, outcome, own))
        self.explainer.started(name, (found - failed) * BLOCK)
        self.explainer.ended(name, [], own)
        self.explainer.settle()
        explanation = self.explainer.answer(name)
        assert explanation is not None
        return explanation, [(MissCause.LOAD_FAILED, "")] * (failed * BLOCK) + tokens

    def planted(self) -> tuple[OffloadKey, Planted, Iterator[Callable[[], object]]]:
        """Return a key, its cause, and the steps that lead to the cause."""
        key, rng, explainer = self.key(), self.rng, self.explainer
        kind = rng.choice([MissCause.EVICTED, MissCause.LOST, MissCause.UNSTORED, MissCause.UNSERVED])
        tier = rng.choice(SECONDARY)
        steps: list[Callable[[], object]] = []

        def happens(*args: OffloadingEvent) -> None:
            steps.extend([lambda: explainer.events(args)])

        if kind is MissCause.UNSTORED and rng.random() < 0.3:
            steps.append(lambda: explainer.ended("earlier", [key]))
            return key, (kind, "cpu"), iter(steps)
        happens(event("cpu", key))
        if kind is MissCause.UNSTORED:
            steps.append(lambda: explainer.unstored([Unstored(tier, [key], [])]))
        else:
            if rng.random() < 0.5:  # declined once, and taken later
                steps.append(lambda: explainer.unstored([Unstored(tier, [key], [])]))
            happens(event(tier, key))
        if kind is MissCause.EVICTED and rng.random() < 0.5:
            happens(event(tier, key, removed=True))
            tier = "cpu"
        happens(event("cpu", key, evicted=True))
        if kind is MissCause.EVICTED and tier != "cpu":
            happens(event(tier, key, evicted=True))
        if kind is MissCause.LOST:
            happens(event(tier, key, removed=True))
        return key, (kind, tier), iter(steps)

    def _mix(self, steps: list[Iterator[Callable[[], object]]]) -> None:
        """Run the steps of all blocks in a random order that keeps those of each block in theirs."""
        while steps:
            chosen = self.rng.choice(steps)
            step = next(chosen, None)
            if step is None:
                steps.remove(chosen)
                continue
            step()
            if self.rng.random() < 0.2:
                self.clock.advance(self.rng.random() * 100)
            if self.rng.random() < 0.2:
                self.explainer.events([event(self.rng.choice(TIERS), self.key())])
            if self.rng.random() < 0.3:
                self.explainer.settle()


def explained(name: str) -> Explainer:
    """Return an explainer with one request of 30 tokens: 4 were found, and four causes explain the others."""
    clock, keys = FakeClock(), keys_of(*range(6))
    explainer = make_explainer(clock)
    explainer.events([event("cpu", *keys[:4]), event("local", *keys[2:4]), event("cpu", *keys[:4], evicted=True)])
    explainer.settle()
    clock.advance(600)
    explainer.missed(Missed(name, 30, 4, 30, 28, keys, LookupOutcome(None, (), LEAST)))
    explainer.started(name, 4)
    return explainer


def causes_of(explanation: Explanation) -> list[Planted]:
    """Return the cause of each computed token.

    Raises:
        AssertionError: a token has no cause, or two.
    """
    begin = explanation.prompt - explanation.computed
    tokens: list[Planted] = []
    for span in explanation.spans:
        assert span.first == begin + len(tokens)
        has_reason = span.cause in (MissCause.UNSERVED, MissCause.NOT_ALLOWED)
        assert (span.reason is not Reason.NONE) == has_reason
        tokens += [(span.cause, span.tier)] * (span.end - span.first)
    assert len(tokens) == explanation.computed
    return tokens


def right_share(seeds: range, requests: int) -> float:
    """Return the share of computed tokens whose planted cause was found.

    Args:
        seeds: one walk each.
        requests: requests of each walk.
    """
    right = tokens = 0
    for seed in seeds:
        walk = Walk(seed)
        for _ in range(requests):
            explanation, planted = walk.request()
            found = causes_of(explanation)
            assert len(found) == len(planted), f"seed {seed}"
            right += sum(map(eq, found, planted))
            tokens += len(planted)
    return right / tokens
