"""Probes of ``check`` that concern the machine, and the stack as a whole."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tiering.admin.records import Finding, Severity
from tiering.advisor.advisor import small_tier
from tiering.api.units import format_bytes
from tiering.config.registry import tier_definition
from tiering.config.stack import order_problems
from tiering.config.stack_file import RecordOptions, StackConfig, WarmStartOptions
from tiering.errors import ConfigError, RegionError
from tiering.machine.user_names import number_of
from tiering.manager.early import BLOCKS_PER_LOOK
from tiering.primary.memory.region import SHM
from tiering.primary.memory.room import check_room
from tiering.secondary.options import BlockTierOptions


def probe_machine(stack: StackConfig, block_bytes: int, device_cache: int | None = None) -> Iterator[Finding]:
    """Yield findings about the memory of this machine or container, and about the stack as a whole.

    Args:
        stack: the stack.
        block_bytes: bytes of one block.
        device_cache: bytes of the engine's own prefix cache; default: unknown.
    """
    in_memory = [
        options.capacity_bytes or 0
        for options in stack.secondary
        if tier_definition(options.type).distance == "process"
    ]
    needed = stack.primary.capacity + (1 + len(stack.users)) * sum(in_memory)  # each user of a service has one
    try:
        check_room(needed, None)
        yield Finding(Severity.OK, "memory", f"there is room for {format_bytes(needed)}")
    except RegionError as error:
        text, _, remedy = str(error).partition(": ")
        yield Finding(Severity.ERROR, "memory", text, remedy)
    yield from _probe_shared_memory(stack.primary.capacity)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < stack.primary.capacity:
        yield Finding(
            Severity.INFO,
            "locked memory",
            f"the limit is {format_bytes(soft)}; CUDA pins the rows without it, other drivers may need it",
            "if pinning fails: ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )
    yield from _probe_sizes(stack, block_bytes)
    exclusive, leads_on = stack.primary.inclusion == "exclusive", bool(stack.secondary)
    if device_cache is not None and stack.mode == "tiering":
        advice = small_tier(stack.primary.capacity, device_cache, leads_on=leads_on, exclusive=exclusive)
        if advice is not None:
            text, _, remedy = advice.partition("; ")
            yield Finding(Severity.WARNING, "inclusion", text, remedy)
    if exclusive:
        text = "what only the engine's own cache holds is lost when it is reset alone, at sleep and with the process"
        offered = stack.secondary or stack.machine
        remedy = "the tiers behind are offered every block" if offered else "inclusive keeps it at such a reset"
        yield Finding(Severity.INFO, "exclusive", text, remedy)
    for problem in order_problems(stack):
        text, _, remedy = problem.partition(": ")
        yield Finding(Severity.WARNING, "order", text, remedy)
    if stack.hints.prefetch:
        yield from _probe_prefetches(stack)
    if stack.warm_start is not None:
        yield _probe_warm_start(stack.warm_start, stack.primary.capacity)
    if stack.events:
        text = "only an engine that takes the manager's events has them; vLLM, SGLang and LMCache refuse the word"
        yield Finding(Severity.INFO, "events", text, "behind one of these, leave it out")
    if stack.record_trace is not None:
        yield _probe_trace(stack.record_trace)
    for user in stack.users:
        try:
            yield Finding(Severity.OK, "users", f"{user} has the number {number_of(user)}")
        except ConfigError as error:
            yield Finding(Severity.ERROR, "users", str(error), "name users of this machine, or their numbers")
    yield from probe_shares(stack)


def probe_shares(stack: StackConfig) -> Iterator[Finding]:
    """Yield a warning about each disk without room for the capacity of every user of a service.

    Each user fills a capacity of its own, and nothing else divides a disk between them: the user that stores last gets
    no room on a full one.
    """
    for index, options in enumerate(stack.secondary):
        path, capacity = getattr(options, "path", None), options.capacity_bytes
        if not stack.users or path is None or capacity is None:
            continue
        directory, where = Path(path).expanduser(), f"secondary[{index}].capacity"
        with suppress(OSError):
            room = os.statvfs(next(each for each in (directory, *directory.parents) if each.exists()))
            size, users = room.f_blocks * room.f_frsize, 1 + len(stack.users)
            if users * capacity > size:
                yield Finding(
                    Severity.WARNING,
                    f"capacity of {options.tier_name}",
                    f"{format_bytes(capacity)} for each of {users} users are {format_bytes(users * capacity)}, and the "
                    f"file system of {path} has {format_bytes(size)}: who fills it first leaves the others no room",
                    f"lower {where} to at most {format_bytes(size // users)}, or name fewer users",
                )


def _probe_shared_memory(capacity: int, directory: Path = SHM) -> Iterator[Finding]:
    try:
        room = os.statvfs(directory)
    except OSError as error:
        yield Finding(
            Severity.WARNING,
            str(directory),
            f"cannot be looked at: {error.strerror}",
            f"mount a tmpfs there: engines with several worker processes need {directory}",
        )
        return
    free = room.f_bavail * room.f_frsize
    if free >= capacity:
        yield Finding(Severity.OK, str(directory), f"{format_bytes(free)} free")
    else:
        yield Finding(
            Severity.WARNING,
            str(directory),
            f"{format_bytes(free)} free; an engine with several worker processes keeps the "
            f"{format_bytes(capacity)} of the primary tier there",
            "docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm; "
            "elsewhere: mount -o remount,size=... /dev/shm",
        )


def _probe_sizes(stack: StackConfig, block_bytes: int) -> Iterator[Finding]:
    """Yield an error about a CPU tier below one block, and warnings about tiers smaller than a faster one."""
    largest, size = "the CPU tier", stack.primary.capacity
    if size < block_bytes:
        yield below_one_block(size, block_bytes)
    for index, options in enumerate(stack.secondary):
        capacity = options.capacity_bytes
        if capacity is None:
            continue
        where, name = f"secondary[{index}].capacity", options.tier_name
        if block_bytes <= capacity <= size:
            yield Finding(
                Severity.WARNING,
                f"capacity of {name}",
                f"{format_bytes(capacity)}, and {largest} before it has {format_bytes(size)}: "
                f"until a restart, {name} holds almost no block that the faster tier lacks",
                f"raise {where}; if the two capacities were swapped, swap them back",
            )
        if capacity > size:
            largest, size = f"the tier {name}", capacity


def _probe_prefetches(stack: StackConfig) -> Iterator[Finding]:
    """Yield a warning about each tier that asks for longer prefixes than a prefetch looks at."""
    for index, options in enumerate(stack.secondary):
        if isinstance(options, BlockTierOptions) and options.min_prefix_blocks > BLOCKS_PER_LOOK:
            yield Finding(
                Severity.WARNING,
                f"prefetches from {options.tier_name}",
                f"a prefetch looks at {BLOCKS_PER_LOOK} blocks at a time, and min_prefix_blocks is "
                f"{options.min_prefix_blocks}: hints bring nothing from this tier",
                f"lower secondary[{index}].min_prefix_blocks to {BLOCKS_PER_LOOK}, or leave hints.prefetch out",
            )


def below_one_block(capacity: int, block_bytes: int) -> Finding:
    """Return the finding about a tier whose capacity is below one block."""
    return Finding(
        Severity.ERROR,
        "capacity",
        f"{format_bytes(capacity)} do not hold one block of {format_bytes(block_bytes)}",
        "raise the capacity (a unit may be missing: 8GiB, not 8), or give the real size of a block with --block-bytes",
    )


def _probe_warm_start(options: WarmStartOptions, capacity: int) -> Finding:
    """Return the finding about the bytes that a warm start can load in its time."""
    wanted, in_time = options.bytes or capacity, int(options.seconds * options.bandwidth)
    text = f"up to {format_bytes(min(wanted, in_time, capacity))} in {options.seconds:g} s"
    if options.bytes is not None and options.bytes > capacity:
        text += f"; warm_start.bytes, {format_bytes(options.bytes)}, is more than the CPU tier"
        return Finding(Severity.WARNING, "warm start", text, "lower warm_start.bytes, or raise primary.capacity")
    if in_time < wanted:
        text += f", not {format_bytes(wanted)}"
        return Finding(Severity.INFO, "warm start", text, "raise warm_start.seconds or warm_start.bandwidth for more")
    return Finding(Severity.OK, "warm start", text)


def _probe_trace(options: RecordOptions) -> Finding:
    """Return the finding about the directory of recorded traces, which an engine makes if it is missing."""
    directory, another = Path(options.path), "choose another record_trace.path"
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        room = os.statvfs(existing)
    except OSError as error:
        text = f"no traces can be recorded in {directory}: {error.strerror}"
        return Finding(Severity.ERROR, "record_trace", text, another)
    if room.f_blocks == 0:
        return Finding(Severity.ERROR, "record_trace", f"the file system of {existing} stores no files", another)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        text = f"no traces can be recorded: {existing} is no directory that user {os.geteuid()} may write in"
        return Finding(Severity.ERROR, "record_trace", text, f"{another}, or give the engine's user rwx there")
    free = room.f_bavail * room.f_frsize
    text = f"{format_bytes(free)} free at {existing}, traces take up to {format_bytes(options.total)}"
    if free < options.total:
        return Finding(Severity.WARNING, "record_trace", text, "lower record_trace.max_total, or free some space")
    return Finding(Severity.OK, "record_trace", text)
