"""The causes of misses, each with a sentence for people.

Exactly one cause holds for each computed prompt token.
"""

from __future__ import annotations

from enum import IntEnum


class MissCause(IntEnum):
    """Cause of a miss; the names in lower case are those of metrics and answers."""

    REMAINDER = 0
    NOT_ALLOWED = 1
    UNSERVED = 2
    UNSTORED = 3
    EVICTED = 4
    LOST = 5
    DIVERGED = 6
    NEW = 7
    LOAD_FAILED = 8
    UNEXAMINED = 9
    OTHER_ADAPTER = 10

    @property
    def word(self) -> str:
        """Name in metrics and answers."""
        return self.name.lower()


class Reason(IntEnum):
    """Reason why a block was not loaded that a tier holds, or that must not be loaded."""

    NONE = 0
    GAP = 1
    LATE = 2
    FAILED = 3
    SHORT = 4
    UNAVAILABLE = 5
    GATED = 6
    CONTROL = 7
    PARAMETERS = 8
    LOGPROBS = 9
    ADAPTER = 10
    RESET = 11
    HUNG = 12
    CUT = 13
    ROOM = 14
    PREPARING = 15

    @property
    def word(self) -> str:
        """Name in answers; empty for :attr:`NONE`."""
        return self.name.lower() if self else ""


OF_A_TIER = frozenset((MissCause.UNSERVED, MissCause.UNSTORED, MissCause.EVICTED, MissCause.LOST))
"""Causes that name a tier."""

SENTENCES = {
    MissCause.REMAINDER: "the end of the prompt, which no hit can cover",
    MissCause.NOT_ALLOWED: "no load was allowed",
    MissCause.UNSERVED: "{tier} has stored the block, and it was not loaded",
    MissCause.UNSTORED: "computed before, and {tier} did not take it",
    MissCause.EVICTED: "evicted from {tier}",
    MissCause.LOST: "{tier} does not have it any more, without an eviction: expired, corrupt or deleted",
    MissCause.DIVERGED: "the prompt differs here from all known prompts that begin alike",
    MissCause.OTHER_ADAPTER: "computed before with another adapter, or without one; the keys differ in the adapter",
    MissCause.NEW: "no known prompt begins alike",
    MissCause.LOAD_FAILED: "a load to the GPU was planned and failed",
    MissCause.UNEXAMINED: "not examined: the record of the block was dropped",
}
"""Sentence of each cause; ``{tier}`` stands for the name of the tier."""

REASONS = {
    Reason.GAP: "a block that the hit needs, in front or of another KV-cache group, was missing",
    Reason.LATE: "the load took longer than load_deadline",
    Reason.HUNG: "nothing came from the tier within load_deadline",
    Reason.CUT: "the load took longer than computing was expected to take",
    Reason.ROOM: "no row of the CPU tier became free for it in time",
    Reason.FAILED: "the tier failed to load it",
    Reason.SHORT: "fewer blocks than the tier's min_prefix_blocks",
    Reason.GATED: "computing was expected to take less time than a load, or load_or_compute is never",
    Reason.CONTROL: "the tier was not asked, to measure what its loads save",
    Reason.UNAVAILABLE: "the tier did not offer it when asked: out of service, too late, or gone from the medium",
    Reason.PARAMETERS: "the request's kv_transfer_params exclude it",
    Reason.LOGPROBS: "the request needs all of its prompt computed, for logprobs of the prompt or pooling",
    Reason.ADAPTER: "the files of its adapter are not known yet, or have changed",
    Reason.RESET: "the caches were being reset",
    Reason.PREPARING: "the memory of the CPU tier was being prepared",
}
"""Sentence of each reason why a block was not loaded."""

REMEDIES = {
    "unstored": "look at admission, stores_dropped, stores_evicted and cascades_failed of {tier}",
    "unstored cpu": "nothing, if the request had store: false, or another one computed the same at once; else look at "
    "stores_without_room",
    "evicted": "give {tier} more capacity, or put a slower tier behind it",
    "lost": "look at corrupt_blocks of {tier} and the log for a damaged medium; of a bucket, at ttl, its lifecycle "
    "rule and others who delete",
    "new": "nothing, if no such prompt came in the known time; after a change of model, dtype, layout, salt or "
    "revision, see below and kv-tiering inspect",
    "diverged": "if the prompts should be alike, move times, names and ids to the end of the template",
    "other_adapter": "nothing, if the requests are meant to use different adapters",
    "load_failed": "look at loads_failed and hits_shrunk, and at the log of the workers",
    "unexamined": "set a larger explain.blocks",
    "gap": "look at the cause of the missing block: it stands in front, or is one of a window"
    " (which are stored as --prefix-cache-retention-interval says)",
    "late": "set a larger load_deadline for {tier}, or load_or_compute: auto; or give the CPU tier more capacity",
    "hung": "find out why {tier} does not answer: see the log, and whether loads_overdue stays above 0; if it is only "
    "slow, set a larger load_deadline, or load_or_compute: auto",
    "cut": "nothing: the load did not pay; if {tier} should be faster, see its worth and speed in `kv-tiering top`",
    "room": "give the CPU tier more capacity, or look at promotion_share and at primary_share of {tier}",
    "failed": "look at the log, and at promotions_failed of {tier}",
    "short": "nothing, if so few blocks are not worth a load; else set a smaller min_prefix_blocks for {tier}",
    "gated": "nothing, if {tier} is as slow as `kv-tiering top` and `bench` show; else set load_or_compute: always",
    "control": "nothing: controls cost at most 0.5% of what loads save; load_or_compute: always has none",
    "unavailable": "look at available, breaker_state and lookups_late of {tier}, and at the log",
    "parameters": "look at load, max_load_tokens and tiers in the request's kv_transfer_params; the log names invalid "
    "ones, which exclude all loads",
    "logprobs": "nothing, if the client needs the prompt's logprobs or all hidden states; else let it ask for none",
    "adapter": "nothing, if few requests: an adapter's first ones; else look at the log for changes of its files",
    "reset": "nothing: a reset ends within seconds",
    "preparing": "nothing: the tiers join some seconds after the start, by the size of the CPU tier",
}
"""Remedy of a miss, by the word of its reason, or of its cause if it has none."""
