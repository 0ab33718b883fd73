"""Checks of a stack whose secondary tiers are in another process: ``machine``, and ``io: process``."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.api.keys import PRIMARY_TIER
from tiering.config.problems import Problem, refused, repeated
from tiering.machine.options import HOSTED_TYPES, PEERS_TIER, MachineOptions
from tiering.secondary.options import TierOptions

_OF_THE_ENGINE = ("min_prefix_blocks", "load_or_compute")


def machine_problems(machine: MachineOptions, secondary: Sequence[TierOptions], io: str) -> list[Problem]:
    """Return what a stack with the word ``machine`` asks for in vain."""
    problems: list[Problem] = []
    if secondary:
        text = "cannot be used with machine: the service hosts the tiers; leave one of the two words out"
        problems.append(Problem(("secondary",), text))
    if io == "process":
        problems.append(Problem(("io",), "has no meaning with machine, which is another process already; leave it out"))
    problems += [
        Problem(("machine", "tiers", index), f"{name!r} is also the name of machine.tiers[{other}]; name each once")
        for index, other, name in repeated(machine.tiers)
    ]
    problems += [
        Problem(("machine", "tiers", index), f"{PRIMARY_TIER!r} is the name of the primary tier")
        for index, name in enumerate(machine.tiers)
        if name == PRIMARY_TIER
    ]
    if PEERS_TIER in machine.tiers and not machine.keep_rows:
        text = f"must be true with {PEERS_TIER} in machine.tiers: engines that find others' rows let theirs be found"
        problems.append(Problem(("machine", "keep_rows"), text))
    return problems


def process_problems(secondary: Sequence[TierOptions]) -> list[Problem]:
    """Return what a stack with ``io: process`` asks for in vain."""
    problems: list[Problem] = []
    if not secondary:
        problems.append(Problem(("io",), "concerns secondary tiers, and there are none; add one, or leave it out"))
    for index, tier in enumerate(secondary):
        if tier.type not in HOSTED_TYPES:
            text = f"a process of its own cannot host {tier.type}; it can host {', '.join(HOSTED_TYPES)}"
            problems.append(Problem(("secondary", index, "type"), text))
        text = "cannot be used with io: process; leave one of the two out"
        problems += refused(tier, _OF_THE_ENGINE, text, ("secondary", index))
    return problems
