"""The start of a manager from a validated stack: first all checks, then opening."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise

from tiering.advisor.advisor import SizeAdvisor
from tiering.api.keys import PRIMARY_TIER
from tiering.api.masking import guard_logs, mask_text, safe_cause
from tiering.api.namespace import ModelIdentity, Namespace, PendingNamespace
from tiering.api.units import format_bytes
from tiering.config.problems import Problem, refuse
from tiering.config.registry import tier_definition
from tiering.config.stack_file import StackConfig
from tiering.errors import ConfigError, TierUnavailableError
from tiering.machine.claim import KeptRegion, claim_rows
from tiering.machine.ledger import RowLedger
from tiering.machine.tier import MachineTier
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.warm_start import WarmStartLimits
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.primary.memory.region import SharedRegion, row_stride, shared_path, sweep
from tiering.primary.memory.side import ONLY_SIDE, RegionSide
from tiering.runtime.news import News
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import Distance, SecondaryTierManager, TierContext
from tiering.secondary.options import TierOptions

_log = logging.getLogger("kv_tiering.stack")


def open_manager(
    stack: StackConfig,
    block_bytes: int | Sequence[int],
    model: ModelIdentity,
    *,
    replica: str | None = None,
    region: SharedRegion | None = None,
    enable_events: bool = False,
    explains: bool = False,
    one_thread: bool = True,
    identify: Callable[[], ModelIdentity] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TieringOffloadingManager:
    """Build and open the tiers of a stack and return their manager.

    Close the manager with ``shutdown``, or use it as a context manager. A tier that does not open within
    ``open_deadline`` is left out until it can be opened; the tier logs the reason once.

    Args:
        stack: the validated stack.
        block_bytes: size of an offloaded block in bytes, without padding, all layers and ranks together; one number, or
            one per KV-cache group.
        model: identity of the model.
        replica: name that tells data-parallel engines of one machine apart; default None.
        region: existing rows; default: new rows, as many as the stack's capacity allows. The manager closes the region
            at shutdown; if this function raises, the caller closes it.
        enable_events: True to collect events even if the stack does not ask for them; default False.
        explains: True to keep what explains misses: the events, and the blocks that tiers do not take. The caller then
            takes both in every step. Default False.
        one_thread: True (default) to check that one thread drives the manager: the first thread that uses it, which may
            differ from the thread that calls this function. False for engines that ensure themselves that no two
            threads use the manager at the same time.
        identify: returns the model's identity for tiers that outlive the process, which join once it is known. It is
            called on their I/O sides, may block for about a second, and raises a :class:`~tiering.errors.StoreError`
            while the identity is not known. Default None: ``model`` is the identity for all tiers.
        clock: monotonic clock in seconds.

    Raises:
        ConfigError: the stack does not fit the engine; nothing was opened.
        RegionError: there is no room for the rows.
        TierUnavailableError: a tier marked ``required`` cannot be opened; everything is closed again.
    """
    if not isinstance(stack, StackConfig):
        raise ConfigError(f"stack: is a {type(stack).__name__}; pass the result of tiering.load_stack")
    if not isinstance(model, ModelIdentity):
        raise ConfigError(f"model: is a {type(model).__name__}; pass a tiering.ModelIdentity")
    group_bytes = _group_bytes(block_bytes)
    row_bytes = row_stride(max(group_bytes))
    _check(stack, max(group_bytes), row_bytes, model, region)
    namespace = Namespace.build(model, group_bytes, namespace=stack.namespace, salt=stack.salt)
    durable = namespace
    if identify is not None:
        build = partial(Namespace.build, group_bytes=group_bytes, namespace=stack.namespace, salt=stack.salt)

        @cache
        def known() -> Namespace:
            found = build(identify())
            _log.info("tiers that outlive the process: %s", _name(found))
            return found

        durable = PendingNamespace(known, namespace.parameters)
    events, news, agreement = enable_events or stack.events or explains, News(), EpochAgreement()
    with ExitStack() as undo:
        rows = region or make_rows(stack, stack.primary.capacity // row_bytes, model, group_bytes)
        if rows is not region:
            undo.callback(rows.close)
        primary = CPUPrimaryTierOffloadingManager(rows, stack.primary.eviction, events)
        tiers: list[SecondaryTierManager] = []
        host = None
        if stack.io == "process":
            from tiering.config.io_process import IoProcess  # brings the service of a machine along

            host = IoProcess(stack.secondary, replica, stack.shutdown_deadline)
            undo.callback(host.close)
            host.start(stack.open_deadline)
        for options in stack.secondary:
            context = TierContext(
                name=options.tier_name,
                primary_view=primary.get_kv_memoryview(),
                group_bytes=group_bytes,
                namespace=durable if host or tier_definition(options.type).persistent else namespace,
                clock=clock,
                enable_events=events,
                replica=replica,
                revision=stack.revision,
                news=news,
                distance=tier_definition(options.type).distance,
                rows_fd=rows.fd,
                agreement=agreement,
            )
            tier = _build(len(tiers), options, context) if host is None else host.tier(options, context)
            undo.callback(tier.shutdown, clock())
            tiers.append(tier)
        manager = TieringOffloadingManager(
            primary,
            tiers,
            events,
            clock=clock,
            promotion_share=stack.primary.promotion_share,
            reservation_deadline=stack.primary.reservation_deadline,
            keep_secondary=stack.keep_secondary,
            reset_deadline=stack.reset_deadline,
            shutdown_deadline=stack.shutdown_deadline,
            news=news,
            agreement=agreement,
            one_thread=one_thread,
            exclusive=stack.primary.inclusion == "exclusive",
            warm_start=_warm_start(stack, rows),
            controls=0,
            advisor=_advisor(stack, rows.num_rows, max(group_bytes)) if stack.advisor else None,
        )
        if isinstance(rows, KeptRegion):
            machine_tiers = [tier for tier in tiers if isinstance(tier, MachineTier)]
            primary.keeper = RowLedger(rows, primary, machine_tiers, agreement, manager.count_inherited)
        if explains:
            manager.keep_unstored()
        undo.pop_all()
        undo.callback(manager.shutdown)
        guard_logs()  # again, because modules imported for these tiers have added loggers
        opened = _open_tiers(stack, manager, clock)
        undo.pop_all()
    for problem in order_problems(stack):
        _log.warning("%s", problem)
    _log.info("%s", _summary(stack, rows, opened, None if durable is not namespace else namespace))
    return manager


def make_rows(
    stack: StackConfig,
    num_rows: int,
    model: ModelIdentity,
    group_bytes: Sequence[int],
    *,
    name: str | None = None,
    side: RegionSide = ONLY_SIDE,
) -> SharedRegion:
    """Return the rows of an engine, if possible those of the service that the stack asks for.

    Args:
        stack: the stack.
        num_rows: number of rows.
        model: identity of the model.
        group_bytes: size of a block in bytes per KV-cache group.
        name: name under which all processes of the engine open the rows; default: there is one process.
        side: this process among those that open the rows; default: it is the only one.

    Raises:
        TieringError: there is no room, or the sides disagree.
    """
    row_bytes = max(group_bytes)
    if stack.machine is not None and stack.machine.keep_rows and not _opened_without_service(name):
        words = stack.namespace, stack.salt, stack.revision
        claimed = name or secrets.token_hex(16)
        kept = claim_rows(stack.machine, claimed, model, group_bytes, words, num_rows, side)
        if kept is not None:
            return kept
    if name is None:
        return SharedRegion.create(num_rows, row_bytes, share=side.share, in_background=side.in_background)
    return SharedRegion.open_shared(name, num_rows, row_bytes, **side._asdict())


def _opened_without_service(name: str | None) -> bool:
    """Return True if an earlier process of the engine found no service, which has come since."""
    if name is None:
        return False
    sweep()
    if found := shared_path(name).exists():
        _log.warning("machine.keep_rows: the service was away when the engine's first process asked for its rows")
    return found


def _warm_start(stack: StackConfig, rows: SharedRegion) -> WarmStartLimits | None:
    """Return the bounds of the warm start that the stack asks for."""
    options = stack.warm_start
    if options is None:
        return None
    return WarmStartLimits(options.bytes or rows.nbytes, options.seconds, options.bandwidth)


def _advisor(stack: StackConfig, rows: int, block_bytes: int) -> SizeAdvisor:
    """Return the size advisor for the tiers that have a capacity."""
    sizes = {options.tier_name: options.capacity_bytes for options in stack.secondary}
    blocks = {name: max(1, size // block_bytes) for name, size in sizes.items() if size is not None}
    return SizeAdvisor({PRIMARY_TIER: rows, **blocks})


def _group_bytes(block_bytes: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(block_bytes) if isinstance(block_bytes, Sequence) else (block_bytes,)
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ConfigError(f"block_bytes: {block_bytes!r} is not a number of bytes, or one for each KV-cache group")
    return sizes


def _check(
    stack: StackConfig, block_bytes: int, row_bytes: int, model: ModelIdentity, region: SharedRegion | None
) -> None:
    """Check the stack against the engine's blocks and model. Opens nothing."""
    problems: list[Problem] = []
    if stack.mode != "tiering":
        problems.append(Problem(("mode",), f"is {stack.mode}, which has no manager of tiers; see tiering.simple"))
    if stack.users:
        problems.append(Problem(("users",), "belongs into the stack of a service (kv-tiering serve); leave it out"))
    if region is not None:
        if region.row_stride < block_bytes:
            raise ConfigError(f"region: its rows have {region.row_stride} bytes, a block has {block_bytes}")
    elif stack.primary.capacity < row_bytes:
        text = f"{stack.primary.capacity} bytes do not hold one block; a row takes {row_bytes} bytes (whole pages)"
        problems.append(Problem(("primary", "capacity"), text))
    reason = model.persistent_reason
    for index, options in enumerate(stack.secondary):
        if options.capacity_bytes is not None and options.capacity_bytes < block_bytes:
            text = f"{options.capacity_bytes} bytes do not hold one block of {block_bytes} bytes"
            problems.append(Problem(("secondary", index, "capacity"), text))
        if reason is not None and tier_definition(options.type).persistent:
            text = (
                f"{options.type} keeps blocks beyond the process, which the model {model.name} does not allow: {reason}"
            )
            problems.append(Problem(("secondary", index, "type"), text))
    if problems:
        refuse("stack", problems)


def _build(index: int, options: TierOptions, context: TierContext) -> SecondaryTierManager:
    """Build one tier. Nothing is opened yet.

    Raises:
        ConfigError: the tier cannot be built; exceptions of the tier's own code are converted.
    """
    where = f"secondary[{index}] ({context.name})"
    cause: Exception | None
    try:
        tier: object = tier_definition(options.type).build(options, context)
        if isinstance(tier, SecondaryTierManager):
            return tier
        text = f"{where}: the build function of {options.type} returned a {type(tier).__name__}, not a tier"
        cause = None
    except ConfigError as error:
        text, cause = f"{where}: {str(error).removeprefix(f'tier {context.name}: ')}", safe_cause(error)
    except MemoryError as error:
        text = f"{where}: its tables do not fit into memory: {error}; lower its capacity, or make blocks larger"
        cause = safe_cause(error)
    except Exception as error:  # a custom tier may raise anything
        text, cause = f"{where}: the tier cannot be built: {type(error).__name__}: {error}", safe_cause(error)
    raise ConfigError(mask_text(text)) from cause


_DISTANCES: Sequence[Distance] = ("process", "machine", "network")
_PLACES = {"process": "in this process's memory", "machine": "on this machine", "network": "on the network"}


def order_problems(stack: StackConfig) -> Iterator[str]:
    """Yield a sentence for each slower tier that stands before a faster one.

    Every lookup and load would then go to the slower tier first.
    """
    distances = [tier_definition(options.type).distance for options in stack.secondary]
    for index, (earlier, later) in enumerate(pairwise(distances)):
        if earlier is not None and later is not None and _DISTANCES.index(earlier) > _DISTANCES.index(later):
            slow, fast = stack.secondary[index : index + 2]
            yield (
                f"secondary[{index}] ({slow.tier_name}) is {_PLACES[earlier]} and stands before "
                f"secondary[{index + 1}] ({fast.tier_name}), which is {_PLACES[later]}: list tiers fastest first, "
                "or blocks that both hold are loaded from the slower one"
            )


def _open_tiers(stack: StackConfig, manager: TieringOffloadingManager, clock: Callable[[], float]) -> list[TierOptions]:
    """Open all tiers within ``open_deadline`` and return the options of the tiers that are open.

    Each tier gets an equal share of the remaining time, so a tier that hangs does not use up the time of the others.

    Raises:
        TierUnavailableError: a tier marked ``required`` did not open.
    """
    opened: list[TierOptions] = []
    tiers = manager.secondary_tiers
    deadline = clock() + stack.open_deadline
    for index, (options, tier) in enumerate(zip(stack.secondary, tiers, strict=True)):
        now = clock()
        share = max(deadline - now, 0.0) / (len(tiers) - index)
        if manager.open_tier(index, now + share):
            opened.append(options)
            continue
        if options.required:
            error = tier.open_error
            reason = f"within {stack.open_deadline:g} s; the log says why" if error is None else f"now: {error}"
            cause = safe_cause(error) if isinstance(error, Exception) else None
            text = f"secondary[{index}] ({tier.name}) is marked required and could not be opened {reason}"
            raise TierUnavailableError(mask_text(text)) from cause
        _log.info("starting without the tier %s; it joins when it can be opened", tier.name)
    return opened


def _summary(stack: StackConfig, rows: SharedRegion, opened: Sequence[TierOptions], namespace: Namespace | None) -> str:
    """Return the capacities and the namespace in use (None: tells its name when it is known), for the log."""
    tiers = [
        f"{tier.tier_name} {'without limit' if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)}"
        for tier in opened
    ]
    primary = (
        f"primary {format_bytes(rows.nbytes)} "
        f"({rows.num_rows} rows of {rows.row_stride} bytes, {stack.primary.eviction})"
    )
    named = "" if namespace is None else f"; {_name(namespace)}"
    return f"tiers: {', '.join([primary, *tiers])}{named}"


def _name(namespace: Namespace) -> str:
    """Return the name of a namespace for the log: the first letters of its directory."""
    return f"namespace {namespace.directory[:8]}"
