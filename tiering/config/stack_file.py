"""The stack file, a YAML file or mapping that describes the tiers.

A stack is validated as a whole before anything is opened. The code of a tier is imported only if a stack uses the tier.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, SerializeAsAny, ValidationError, WrapValidator, model_validator

from tiering.api.hints import HintBounds
from tiering.api.keys import PRIMARY_TIER
from tiering.api.masking import guard_logs, masked, shown
from tiering.api.namespace import revision_digest
from tiering.api.units import Directory, Duration, Share, Size, Strict
from tiering.config.other_process import machine_problems, process_problems
from tiering.config.problems import Problem, Problems, changed, problems_of, refuse, repeated
from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.config.source import StackSource, escaped, map_texts, read_source
from tiering.errors import ConfigError
from tiering.explain.past_blocks import MOST_TIERS
from tiering.machine.options import LONGEST_SOCKET, MachineOptions
from tiering.machine.user_names import MOST_USERS, UserName
from tiering.secondary.options import TierOptions, known_policy


def _checked_revision(revision: str) -> str:
    revision_digest(revision)
    return revision


def _read_tier(value: object, handler: object) -> TierOptions:
    """Read one entry of ``secondary`` as the options that its type declares.

    Raises:
        Problems: the entry is invalid.
    """
    if isinstance(value, TierOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{shown(value)} is not a mapping; write it like {{type: local, path: /var/cache/kv, capacity: 500GiB}}"
        )
    if "type" not in value:
        raise Problems([Problem(("type",), f"is missing; allowed are {', '.join(TIER_TYPES)}, or module.path:Name")])
    try:
        options = tier_definition(value["type"]).options
    except ConfigError as error:
        raise Problems([Problem(("type",), str(error))]) from error
    refused = options.refused_words(value)
    problems = [
        Problem((word,), f"is not supported by {value['type']} tiers: {reason}") for word, reason in refused.items()
    ]
    tier = None
    try:
        tier = options.model_validate({word: item for word, item in value.items() if word not in refused})
    except ValidationError as error:
        problems += problems_of(error, options)
    except Exception as error:  # validators of a custom tier may raise anything
        problems.append(Problem((), f"its options cannot be checked: {type(error).__name__}: {error}"))
    if tier is None or problems:
        raise Problems(problems)
    return tier


SecondaryTier = SerializeAsAny[Annotated[TierOptions, WrapValidator(_read_tier)]]
"""The options of a secondary tier, in the class that its ``type`` declares."""


class PrimaryOptions(Strict):
    """The CPU tier."""

    capacity: Size
    """Bytes of the shared memory for rows, of all ranks together."""
    eviction: Annotated[str, AfterValidator(known_policy)] = "lru"
    """Eviction policy: "lru" (default), "arc" or ``module:Class``."""
    inclusion: Literal["inclusive", "exclusive"] = "inclusive"
    """"inclusive" (default), or "exclusive": keep what the engine's own cache does not hold.

    An exclusive tier evicts first what the engine holds as well, and stores blocks that are about to leave its cache.
    """
    promotion_share: Share = 0.5
    """Largest fraction of the rows for promoted blocks that are not loaded yet; default 0.5."""
    promote_waiting: bool = False
    """True to promote blocks of requests that still wait in the engine's queue; default False.

    They take at most half of the rows of ``promotion_share``.
    """
    reservation_deadline: Duration = 30.0
    """Time for which a promoted block is reserved for the waiting requests, in seconds; default 30.

    The block can be evicted afterwards.
    """


KeptShare = Annotated[float, Field(ge=0.0, le=0.5)]
"""Share of a tier that hints of one kind may keep."""


class HintOptions(Strict):
    """Hints of requests about the later use of their blocks."""

    release: bool = True
    """True (default) to evict the blocks of a session first once a hint says that the session is over."""
    retain: KeptShare = 0.5
    """Largest share of each tier that hints may retain at a time; default 0.5, 0 to retain none."""
    expect: bool = True
    """True (default) to retain the blocks of a session that a hint expects to return; see ``retain``."""
    pin: KeptShare = 0.0
    """Largest share of each tier that hints may pin at a time; default 0: none."""
    prefetch: Size | None = None
    """Bytes per second that hints of one cache salt may promote ahead of their requests; default: none."""
    longest: Duration = 3600.0
    """Longest time for which a hint keeps blocks, in seconds; default 3600."""
    blocks: Annotated[int, Field(ge=0, le=1 << 24)] = 1 << 18
    """Largest number of blocks whose sessions are followed; default 262144.

    A block takes up to 240 bytes. The sessions that were used longest ago are dropped beyond it.
    """

    @property
    def bounds(self) -> HintBounds:
        """The bounds for the connector."""
        prefetch = float(self.prefetch or 0)
        return HintBounds(self.release, self.blocks, self.retain, self.expect, self.pin, prefetch, self.longest)


class WarmStartOptions(Strict):
    """A start with the blocks that the engine, or others of the fleet, used last."""

    bytes: Size | None = None
    """Most bytes that a start loads into the CPU tier; default: as much as its free rows hold."""
    seconds: Duration = 120.0
    """Time for which blocks are loaded, once the CPU tier is prepared, in seconds; default 120."""
    bandwidth: Size = 512 << 20
    """Bytes per second that are loaded at most; default 512MiB.

    A tenth of a second of it is in flight at once, and may delay the load of a request by as much.
    """


class RecordOptions(Strict):
    """A trace of the requests, for later replays."""

    path: Directory
    """Directory for the files ``trace-HOST-PROCESS-NUMBER.jsonl``; made if it does not exist."""
    max_size: Size = 1 << 30
    """Largest size of one process's files together; default 1GiB.

    The oldest file makes room for a new one.
    """
    max_total: Size | None = None
    """Largest size of all trace files in the directory together; default: four times ``max_size``.

    The oldest files make room for a new one: those of processes that have ended come first.
    """

    @model_validator(mode="after")
    def _check_sizes(self) -> RecordOptions:
        if self.max_total is not None and self.max_total < self.max_size:
            raise ValueError(
                f"max_total {self.max_total} is below max_size {self.max_size}, the share of one process; "
                "raise max_total or lower max_size"
            )
        return self

    @property
    def total(self) -> int:
        """Largest size of all trace files in the directory together, in bytes."""
        return 4 * self.max_size if self.max_total is None else self.max_total


class ExplainOptions(Strict):
    """The explanation of misses: why each prompt token was computed."""

    blocks: Annotated[int, Field(ge=1024, le=1 << 24)] = 1_000_000
    """Largest number of past blocks that are followed; default 1000000. A block takes 28 bytes."""
    requests: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Number of the latest requests that ``kv-tiering why`` can explain; default 1000."""
    socket: Directory | None = None
    """UNIX socket on which the engine answers ``kv-tiering why``; default: a new one of the user.

    The new one is in the user's runtime directory, and the log names it. Each engine needs a socket of its own.
    """

    @model_validator(mode="after")
    def _check_socket(self) -> ExplainOptions:
        length = 0 if self.socket is None else len(bytes(Path(self.socket).expanduser()))
        if length > LONGEST_SOCKET:
            raise ValueError(f"socket: its path has {length} bytes; a UNIX socket's has at most {LONGEST_SOCKET}")
        return self


class StackConfig(Strict):
    """A whole stack: the primary tier, and the secondary tiers, fastest first.

    Printing a stack masks secrets.
    """

    primary: PrimaryOptions
    """The primary tier."""
    secondary: tuple[SecondaryTier, ...] = ()
    """The secondary tiers, fastest first; default none."""
    machine: MachineOptions | None = None
    """Service of this machine that hosts the secondary tiers, in place of ``secondary``; default None.

    ``kv-tiering serve`` is the service. Engines of one machine then share the tiers.
    """
    io: Literal["thread", "process"] = "thread"
    """"thread" (default): secondary tiers work in the engine; "process": in a process of its own.

    The process is started and ended with the engine, and leaves the interpreter to the engine's steps.
    """
    users: Annotated[tuple[UserName, ...], Field(max_length=MOST_USERS)] = ()
    """Names or numbers of further users whose engines a service takes; default: only its own user.

    Each has blocks, rows and limits of its own, and finds nothing of the others'. Only for ``kv-tiering serve``.
    """
    namespace: str = ""
    """Name of the cache; default empty. Stacks with different names never share blocks."""
    salt: str = ""
    """Like ``namespace``, but secret: only a digest of the salt enters the fingerprint."""
    revision: Annotated[str, AfterValidator(_checked_revision)] | None = None
    """Name of the weights at the start, like the argument of ``reset_cache`` later; default None.

    Needed where neither ``namespace`` nor the model's identity tells different weights apart.
    """
    keep_secondary: bool = False
    """True to keep the blocks of secondary tiers over a reset that names no revision; default False.

    Right only if the weights never change at a reset.
    """
    advisor: bool = True
    """True (default) to estimate the hit rates that other capacities of the tiers would have.

    The statistics of each tier show the estimates, from a quarter to sixteen times its capacity.
    """
    hints: HintOptions = HintOptions()
    """Hints of requests that are followed."""
    warm_start: WarmStartOptions | None = None
    """Blocks that are loaded into the CPU tier when an engine starts; default None.

    The engine also publishes in its secondary tiers which blocks it uses.
    """
    record_trace: RecordOptions | None = None
    """Trace of the finished requests for replays; default None.

    The trace holds times, lengths and hashes of blocks, and no text.
    """
    explain: ExplainOptions | None = None
    """Explanation of misses; default None.

    ``explain: {}`` turns it on. An engine's connector explains; ``open_manager`` alone does not.
    """
    report_cached: bool = False
    """True to report the cached tokens of each request by tier; default False.

    Responses have those of their request, and counters those of each tenant, which is a cache salt. An engine's
    connector reports; ``open_manager`` alone does not.
    """
    events: bool = False
    """True to announce stored and removed blocks; default False.

    vLLM refuses it: there, ``--kv-events-config`` decides in both modes.
    """
    mode: Literal["tiering", "simple"] = "tiering"
    """"tiering" (default), or "simple": a CPU pool that mirrors the GPU's, without secondary tiers.

    :mod:`tiering.simple` implements the simple mode.
    """
    layout: Literal["plain", "canonical"] = "plain"
    """"plain" (default): workers side by side; "canonical": one format for all tensor-parallel sizes.

    Canonical blocks hold the KV heads of all ranks in order, layer by layer. Engines with other numbers of workers then
    share them. An engine's connector lays out blocks; ``open_manager`` alone does not.
    """
    lazy_offload: bool = False
    """In mode simple: True to store blocks when they are about to leave the GPU; default False.

    False stores all blocks as soon as they are computed.
    """
    open_deadline: Duration = 10.0
    """Time that the start may wait for tiers to open, in seconds; default 10.

    Slower tiers join when they are ready.
    """
    reset_deadline: Duration = 0.05
    """Time that a reset may block the engine until the tiers' media confirm it, in seconds; default 0.05.

    Media that take longer confirm in the background.
    """
    shutdown_deadline: Duration = 30.0
    """Time that a shutdown may wait for queued stores, in seconds; default 30."""

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("secondary"), Mapping):
            raise Problems([Problem(("secondary",), "is a mapping; it must be a list of tiers, fastest first")])
        return {**data, "secondary": ()} if isinstance(data, Mapping) and data.get("secondary", ()) is None else data

    @model_validator(mode="after")
    def _check_together(self) -> StackConfig:
        problems = [
            Problem(
                ("secondary", index, "name"),
                f"{name!r} is also the name of secondary[{other}]; give each tier a name of its own",
            )
            for index, other, name in repeated(tier.tier_name for tier in self.secondary)
        ]
        problems += [
            Problem(
                ("secondary", index, "name"), f"{PRIMARY_TIER!r} is the name of the primary tier; give this one another"
            )
            for index, tier in enumerate(self.secondary)
            if tier.tier_name == PRIMARY_TIER
        ]
        places: list[str | None] = []
        for index, tier in enumerate(self.secondary):
            try:
                places.append(tier_definition(tier.type).location(tier))
            except Exception as error:  # a custom tier may raise anything
                places.append(None)
                problems.append(
                    Problem(("secondary", index), f"its location cannot be determined: {type(error).__name__}: {error}")
                )
        problems += [
            Problem(("secondary", index), f"shares {place} with secondary[{other}]; two tiers cannot be in one place")
            for index, other, place in repeated(places)
        ]
        problems += [
            Problem(
                ("secondary", index),
                f"{place} is a part of {outer}, which is the place of secondary[{other}]; keep them apart",
            )
            for index, place in enumerate(places)
            for other, outer in enumerate(places)
            if place and outer and place != outer and outer.startswith("/") and Path(place).is_relative_to(outer)
        ]
        problems += [
            Problem(
                ("revision",),
                f"is missing, and secondary[{index}] ({tier.tier_name}) needs it: {reason}; "
                "set revision, and another one after each change of the weights",
            )
            for index, tier in enumerate(self.secondary)
            if self.revision is None and (reason := tier_definition(tier.type).needs_revision)
        ]
        problems += self._check_warm_start()
        tiers = self.secondary if self.machine is None else self.machine.tiers
        if self.explain is not None and len(tiers) >= MOST_TIERS:
            text = f"follows at most {MOST_TIERS - 1} secondary tiers; leave explain out, or some tiers"
            problems.append(Problem(("explain",), text))
        if not self.secondary and self.mode == "tiering":
            for where, is_set in (
                (("hints", "prefetch"), self.hints.prefetch),
                (("primary", "promote_waiting"), self.primary.promote_waiting),
            ):
                if is_set:
                    text = "promotes blocks of secondary tiers, and there are none; add one, or leave it out"
                    problems.append(Problem(where, text))
        kept = any(tier_definition(tier.type).persistent for tier in self.secondary)
        if self.layout == "canonical" and self.mode == "tiering" and self.machine is None and not kept:
            text = (
                "canonical serves other and later engines, and no tier keeps blocks for them; add one, or leave it out"
            )
            problems.append(Problem(("layout",), text))
        problems += self._check_mode()
        if self.machine is not None and self.mode == "tiering":
            problems += machine_problems(self.machine, self.secondary, self.io)
        elif self.io == "process" and self.mode == "tiering":
            problems += process_problems(self.secondary)
        if problems:
            raise Problems(problems)
        if self.machine is not None:
            object.__setattr__(self, "secondary", self.machine.tier_options())  # the model is frozen from here on
        return self

    def _check_warm_start(self) -> list[Problem]:
        """Refuse a warm start without a tier that outlives the process and keeps documents."""
        kept = [tier_definition(tier.type) for tier in self.secondary]
        # The tiers that need a revision keep no documents.
        simple, serviced = self.mode == "simple", self.machine is not None
        if self.warm_start is None or simple or serviced or any(t.persistent and not t.needs_revision for t in kept):
            return []
        text = "needs a secondary tier that outlives the engine and keeps documents: local, object, s3 or valkey"
        return [Problem(("warm_start",), f"{text}; add one, or leave warm_start out")]

    def _check_mode(self) -> list[Problem]:
        if self.mode != "simple":
            return (
                [Problem(("lazy_offload",), "has a meaning in mode simple only; leave it out, or set mode: simple")]
                if self.lazy_offload
                else []
            )
        problems = [
            Problem(("secondary", index), "mode simple has no secondary tiers; leave them out, or use mode tiering")
            for index in range(len(self.secondary))
        ]
        unused = changed(self) - {"primary", "secondary", "events", "mode", "lazy_offload"}
        unused_primary = changed(self.primary) - {"capacity"}
        if "record_trace" in unused:
            unused.remove("record_trace")
            problems.append(
                Problem(("record_trace",), "mode simple records no trace; leave it out, or use mode tiering")
            )
        problems += [Problem((word,), "has no meaning in mode simple; leave it out") for word in sorted(unused)]
        problems += [
            Problem(("primary", word), "has no meaning in mode simple; leave it out") for word in sorted(unused_primary)
        ]
        return problems

    def describe(self) -> str:
        """Return the stack as YAML with all defaults filled in and secrets masked."""
        words: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        for tier, section in zip(self.secondary, words["secondary"], strict=True):
            for word in tier.unsupported:
                section.pop(word, None)
        if self.machine is not None:
            del words["secondary"]
        dumped = map_texts(masked("", words), escaped)
        return yaml.safe_dump(dumped, sort_keys=False, default_flow_style=None, width=132)


def load_stack(stack: str | os.PathLike[str] | Mapping[str, object] | StackSource) -> StackConfig:
    """Read and validate a stack. Opens nothing.

    Args:
        stack: path of a YAML file, or the content of such a file as a mapping or as read before.

    Raises:
        ConfigError: the stack is invalid. The message lists every problem with the path of the field, its line, the
            reason and the allowed values.
    """
    source = read_source(stack)
    problems = list(source.problems)
    try:
        config = StackConfig.model_validate(source.data)
    except ValidationError as error:
        known = {problem.path for problem in problems}
        problems += [problem for problem in problems_of(error, StackConfig) if problem.path not in known]
    except Exception as error:  # a custom tier may raise anything
        problems.append(Problem((), f"cannot be checked: {type(error).__name__}: {error}"))
    guard_logs()
    if problems:
        refuse(source.name, problems, source.lines)
    return config
