"""Index of a medium shared with other processes: expiring results of probes, in bounded memory.

The place of a block is a name: that of the namespace, the fingerprint of the epoch, and the key. So the index need not
remember places. It remembers whether a load of the key is worth trying. Unknown keys are probed once per prefix. Their
lookups stay undecided until a deadline.

A prefix is held up to some point. A probe runs on the I/O side: it looks at exponential distances until a block is
absent, then narrows the gap. Each round asks for several positions at once, because a round trip costs far more than a
question. A cautious probe, which most likely finds nothing, asks for the first block alone to begin with.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, islice, repeat, takewhile
from operator import eq, lt
from typing import Any, ClassVar, NamedTuple, Self

from tiering.api.keys import OffloadKey
from tiering.api.namespace import Namespace
from tiering.index.tier_index import Probe, StorePlan, TierIndex
from tiering.medium.block_store import Place, StoreProbe
from tiering.secondary.contract import PrefixAnswer
from tiering.secondary.options import SharedOptions
from tiering.table.disposal import DISPOSAL, Table

MAX_ENTRIES = 1 << 20
"""Maximum number of entries in each of the two tables, present and absent."""

MAX_PROBES = 1024
"""Maximum number of open probes; beyond it, an unknown key is a miss.

Lookups of one block may take half of them: a search may ask about many single blocks at once.
"""

MAX_REFUSED = 1 << 16
"""Maximum number of corrupt blocks that are remembered; beyond it, the oldest is forgotten."""

_ONE = PrefixAnswer(1, False)
_MISSED = float("-inf")
_NEVER = float("inf")

PROBE_WIDTH = 8
"""Number of positions probed in one round."""

_GROWTH = 4

REFUSED_SECONDS = 3600.0
"""Seconds for which a corrupt block is left alone, unless it is known to have left the medium."""


_PLACE = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})/(?:[0-9a-f]{2}/)?((?:[0-9a-f]{2})+)(?:\.[1-9])?")
"""Place of a block, perhaps without the digits that spread names, or with the number of a second name."""


class NamedPlace(NamedTuple):
    """The parts of a place whose name states namespace, epoch and key."""

    namespace: str
    """Base of the namespace as 32 hex digits."""
    fingerprint: str
    """Fingerprint of namespace and epoch as 32 hex digits."""
    key: bytes


def place_prefix(namespace: Namespace) -> str:
    """Return the prefix of the places of one namespace and epoch."""
    return f"{namespace.directory}/{namespace.fingerprint.hex()}/"


def parse_place(place: str) -> NamedPlace | None:
    """Return the parts of ``place``; None if no shared index has named such a place."""
    match = _PLACE.fullmatch(place)
    return None if match is None else NamedPlace(match[1], match[2], bytes.fromhex(match[3]))


def object_name(prefix: str, key: OffloadKey) -> str:
    """Return the place of ``key``: two hex digits that spread the names, then the key."""
    digits = key.hex()
    return f"{prefix}{digits[:2]}/{digits}"


def object_names(prefix: str, keys: Sequence[OffloadKey]) -> list[Place]:
    """Return the places of ``keys``, as :func:`object_name` does for each."""
    return [f"{prefix}{digits[:2]}/{digits}" for digits in map(bytes.hex, keys)]


class SharedIndex(TierIndex):
    """Index of a shared medium.

    Args:
        present_ttl: seconds for which a block counts as present after it was found or stored; default 300.
        absent_ttl: seconds for which a block counts as absent after a probe or load missed it; default 10.
        lookup_deadline: seconds for which a lookup stays undecided while a probe is under way; default 0.25. After that
            the lookup finds the head that the probe has found so far.
        wait_per_block: seconds by which each block that the lookup may find extends its deadline; default 0.
        longest_wait: longest extended deadline of a lookup in seconds; default 5.
        cautious_after: number of probes in a row that found nothing, after which a probe asks for its first block
            alone; for media that take one request per block; default: None, never.
        on_absent: function that receives the places of blocks that are about to be stored, if a probe found the first
            of them absent at most ``absent_ttl`` seconds ago; default: none.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        *,
        present_ttl: float = 300.0,
        absent_ttl: float = 10.0,
        lookup_deadline: float = 0.25,
        wait_per_block: float = 0.0,
        longest_wait: float = 5.0,
        cautious_after: int | None = None,
        on_absent: Callable[[Sequence[Place]], None] | None = None,
    ) -> None:
        self._present_ttl = present_ttl
        self._absent_ttl = absent_ttl
        self._lookup_deadline = lookup_deadline
        self._wait_per_block = wait_per_block
        self._longest_wait = max(longest_wait, lookup_deadline)
        self._cautious_after = cautious_after
        self._on_absent = on_absent
        self._present: OrderedDict[OffloadKey, float] = OrderedDict()
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()
        self._unanswered: OrderedDict[OffloadKey, float] = OrderedDict()
        """Keys whose probe found out nothing, with the time until which lookups miss them."""
        self._refused: OrderedDict[OffloadKey, float] = OrderedDict()
        self._writing: set[Place] = set()
        self._asked: dict[OffloadKey, Probe] = {}
        """The open probes, by first key."""
        self._late = 0
        self._misses_in_a_row = 0
        self._raised: list[Probe] = []
        self._prefix = ""
        self.place_of: Callable[[OffloadKey], Place] = partial(object_name, "")
        """Function that returns the place of a key in the present epoch; another function in the next epoch."""

    @classmethod
    def of(cls, options: SharedOptions, **settings: Any) -> Self:
        """Return an index with the durations that a tier's options name, and other arguments of the class."""
        present, absent, deadline = options.present_ttl, options.absent_ttl, options.lookup_deadline
        return cls(present_ttl=present, absent_ttl=absent, lookup_deadline=deadline, **settings)

    def enter(self, place_prefix: str) -> None:
        DISPOSAL.add(self.clear())
        self._prefix = place_prefix
        self.place_of = partial(object_name, place_prefix)

    def lookup_prefix(self, keys: Sequence[OffloadKey], now: float) -> PrefixAnswer:
        held = 0
        if not keys or self._present.get(keys[0], 0.0) > now:
            if len(keys) == 1:
                return _ONE
            known = list(map(self._present.get, keys, repeat(0.0)))
            if not known or min(known) > now:
                return PrefixAnswer(len(known), False)
            held = len(list(takewhile(partial(lt, now), known)))
        first = keys[held]
        if self._misses(first, now) or first in self._refused:
            self._drop_behind(keys[held:] if held else keys, now)
            return PrefixAnswer(held, False)
        probe = self._asked.get(first)
        if probe is not None:
            if now < probe.undecided_until:
                return PrefixAnswer(held, True)
            if probe.undecided_until > _MISSED:
                probe.undecided_until = _MISSED
                held += self._take_progress(probe, keys[held:], now)
            return PrefixAnswer(held, False)
        most = MAX_PROBES if len(keys) > 1 else MAX_PROBES // 2
        if len(self._asked) >= most or self.place_of(first) in self._writing:
            return PrefixAnswer(held, False)
        wait = self._lookup_deadline + (len(keys) - held) * self._wait_per_block
        until = now + min(wait, self._longest_wait)
        cautious = self._cautious_after is not None and self._misses_in_a_row >= self._cautious_after
        self._raise(Probe(keys[held:], self.place_of, expires=until, cautious=cautious, undecided_until=until))
        return PrefixAnswer(held, True)

    def _raise(self, probe: Probe) -> None:
        self._asked[probe.keys[0]] = probe
        self._raised.append(probe)

    def _take_progress(self, probe: Probe, keys: Sequence[OffloadKey], now: float) -> int:
        """Return the number of leading blocks that a probe has found so far; the next one is a miss.

        Another request's chain may go on differently behind the first key.
        """
        found = len(list(takewhile(bool, map(eq, keys, probe.keys[: probe.held]))))
        if not found:
            self._late += 1
            return 0
        self._learn_present(keys[:found], now + self._present_ttl)
        if found < len(keys):
            self._unanswered[keys[found]] = now + min(self._lookup_deadline, self._absent_ttl)
            self._trim(self._unanswered)
        return found

    def take_probes(self, now: float) -> Sequence[Probe]:
        if not self._raised:
            return ()
        raised, self._raised = self._raised, []
        return raised

    def end_probe(self, probe: Probe, held: int | None, now: float) -> Sequence[OffloadKey]:
        if probe.place_of is not self.place_of:
            return ()
        self._asked.pop(probe.keys[0], None)
        self._forgive(now)
        if held is None:
            self._unanswered[probe.keys[0]] = now + min(self._lookup_deadline, self._absent_ttl)
            self._present.pop(probe.keys[0], None)
            self._trim(self._unanswered)
            return ()
        self._misses_in_a_row = 0 if held else self._misses_in_a_row + 1
        self._learn_present(probe.keys[:held], now + self._present_ttl)
        # A store of this process may have ended during the probe: its result is newer than the probe's.
        if held < len(probe.keys) and self._present.get(probe.keys[held], 0.0) <= now:
            self._learn_absent(probe.keys[held : held + 1], now + self._absent_ttl)
        return self._unheld(probe.keys[held:]) if probe.offers else ()

    def holds_epoch(self, places: Sequence[Place]) -> bool:
        """Return True if ``places`` are in the present epoch."""
        return bool(places) and str(places[0]).startswith(self._prefix)

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey] | None:
        """Return the keys known to be absent, and the unknown ones after them.

        Prefixes are stored from their head. A block that was present once is assumed to be present still, however long
        ago, unless a block in front of it was found absent later. Offering a block that other processes hold costs a
        request and its bytes, and a lookup finds out if the block is gone.

        Keys without any record (after a restart, or dropped in an outage) are probed first. That is one probe for a
        chain instead of a write for each of its blocks.
        """
        present = self._present
        if self._refused:
            keys = list(takewhile(lambda key: key not in self._refused, keys))
        if all(map(present.__contains__, keys)):
            return ()
        unheld = keys[len(list(takewhile(present.__contains__, keys))) :]
        first = unheld[0]
        if self._misses(first, now):
            self._drop_behind(unheld, now)
            return self._unheld(unheld)
        if first not in self._asked and len(self._asked) < MAX_PROBES and self.place_of(first) not in self._writing:
            until, wait = now + self._longest_wait, now + self._lookup_deadline
            self._raise(Probe(unheld, self.place_of, offers=True, expires=until, undecided_until=wait))
        return None

    def _unheld(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        present, writing, place_of = self._present, self._writing, self.place_of
        return [key for key in keys if key not in present and (not writing or place_of(key) not in writing)]

    def plan_store(self, keys: Sequence[OffloadKey], now: float) -> StorePlan:
        places = object_names(self._prefix, keys)
        self._drop_behind(keys, now)
        unknown = not self._refused and self._writing.isdisjoint(places)
        if unknown and self._present.keys().isdisjoint(keys):
            return self._begin_writing(keys, StorePlan(list(range(len(keys))), places), now)
        known = list(map(partial(lt, now), map(self._present.get, keys, repeat(0.0))))
        if unknown and True not in known:
            return self._begin_writing(keys, StorePlan(list(range(len(keys))), places), now)
        if False in known and known[0]:
            self._drop_behind(keys[known.index(False) :], now)
            known = list(map(partial(lt, now), map(self._present.get, keys, repeat(0.0))))
        named, places = places, []
        positions: list[int] = []
        already_held: list[int] = []
        for position, (place, present) in enumerate(zip(named, known, strict=True)):
            if present:
                already_held.append(position)
            elif place not in self._writing and keys[position] not in self._refused:
                positions.append(position)
                places.append(place)
        return self._begin_writing(keys, StorePlan(positions, places, already_held), now)

    def _begin_writing(self, keys: Sequence[OffloadKey], plan: StorePlan, now: float) -> StorePlan:
        """Record that the places of ``plan``, a store of some of ``keys``, are being written; return ``plan``."""
        positions = plan.positions
        self._writing.update(plan.places)
        # Prefixes are stored from their head: where the first block is absent, so are those behind it.
        if self._on_absent is not None and positions and self._absent.get(keys[positions[0]], 0.0) > now:
            self._on_absent(plan.places)
        return plan

    def end_store(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], stored: Sequence[bool], now: float
    ) -> None:
        self._writing.difference_update(places)
        if self.holds_epoch(places):
            if False in stored:
                keys = list(compress(keys, stored))
            self._learn_present(keys, now + self._present_ttl)

    def begin_load(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return a name for each key, known or not: an absent block is a miss when it is read."""
        return [*object_names(self._prefix, keys)]

    def end_load(
        self, keys: Sequence[OffloadKey], places: Sequence[Place], lost: Sequence[bool], now: float
    ) -> list[OffloadKey]:
        if not self.holds_epoch(places):
            return []
        gone = list(compress(keys, lost))
        if gone:
            self._learn_absent(gone, now + self._absent_ttl)
        return gone

    def touch(self, keys: Sequence[OffloadKey], used: bool = True) -> None:
        """Do nothing: no process sees all accesses of a shared medium, so there is no recency to keep."""

    @property
    def late_lookups(self) -> int:
        return self._late

    def refuse(self, keys: Sequence[OffloadKey], now: float) -> None:
        deque(map(self._present.pop, keys, repeat(None)), maxlen=0)
        self._refused.update(dict.fromkeys(keys, now + REFUSED_SECONDS))
        self._forgive(now)

    def pardon(self, key: OffloadKey) -> None:
        self._refused.pop(key, None)

    def sample(self, count: int) -> list[tuple[OffloadKey, Place]]:
        return [(key, self.place_of(key)) for key in islice(reversed(self._present), count)]

    def clear(self) -> Sequence[Table]:
        held = self._present
        DISPOSAL.add((self._absent, self._refused))
        self._present, self._absent, self._refused = OrderedDict(), OrderedDict(), OrderedDict()
        self._unanswered.clear()
        self._asked.clear()
        self._raised.clear()
        # Probes under way are recognized as older by this object, jobs under way by their places' prefix.
        self.place_of = partial(object_name, self._prefix)
        return (held,)

    @property
    def blocks(self) -> int:
        return len(self._present)

    def _forgive(self, now: float) -> None:
        """Forget the blocks that were refused long ago, and the oldest ones beyond the bound."""
        refused = self._refused
        while refused and (len(refused) > MAX_REFUSED or next(iter(refused.values())) <= now):
            refused.popitem(last=False)

    def _misses(self, key: OffloadKey, now: float) -> bool:
        """Return True if ``key`` was found absent, or its probe found out nothing, a short while ago."""
        return self._absent.get(key, 0.0) > now or self._unanswered.get(key, 0.0) > now

    def _drop_behind(self, keys: Sequence[OffloadKey], now: float) -> None:
        """Drop what is known of ``keys``, a chain, from before its first key was found absent."""
        present = self._present
        until = self._absent.get(keys[0], 0.0) if keys else 0.0
        if until <= now or present.keys().isdisjoint(keys):
            return
        latest = until - self._absent_ttl + self._present_ttl
        for key in keys:
            if present.get(key, _NEVER) < latest:
                del present[key]

    def _learn_present(self, keys: Sequence[OffloadKey], until: float) -> None:
        if not keys:
            return
        if self._refused:
            keys = [key for key in keys if key not in self._refused]
        self._present.update(dict.fromkeys(keys, until))
        for missed in (self._absent, self._unanswered):
            if missed and not missed.keys().isdisjoint(keys):
                deque(map(missed.pop, keys, repeat(None)), maxlen=0)
        self._trim(self._present)

    def _learn_absent(self, keys: Sequence[OffloadKey], until: float) -> None:
        self._absent.update(dict.fromkeys(keys, until))
        if not self._present.keys().isdisjoint(keys):
            deque(map(self._present.pop, keys, repeat(None)), maxlen=0)
        self._trim(self._absent)

    def _trim(self, table: OrderedDict[OffloadKey, float]) -> None:
        while len(table) > MAX_ENTRIES:
            table.popitem(last=False)


def held_prefix(ask: Callable[[Sequence[Place]], StoreProbe], probe: Probe, width: int = PROBE_WIDTH) -> int | None:
    """Return how many leading keys of ``probe`` the medium holds; None if the first is not known.

    Other keys about which the medium gives no answer count as absent. Positions between two held ones are assumed to be
    held: if such a block is absent, its load is a miss.

    Args:
        ask: probes the places given to it (:meth:`~tiering.medium.block_store.BlockStore.probe`).
        probe: the probe to run.
        width: number of positions probed in one round.
    """
    held, missing = 0, len(probe.keys)
    bounded = False
    if probe.cautious and missing > 1:
        (first,) = ask([probe.place_of(probe.keys[0])]).held
        if not first:
            return None if first is None else 0
        held = probe.held = 1
    while held < missing:
        positions = _narrow(held, missing, width) if bounded else _reach(held, missing, width)
        answers = ask([probe.place_of(probe.keys[position]) for position in positions]).held
        for position, answer in zip(positions, answers, strict=True):
            if not answer:
                if answer is None and position == 0:
                    return None
                missing, bounded = position, True
                break
            held = position + 1
        probe.held = held
    return held


def held_each(ask: Callable[[Sequence[Place]], StoreProbe], probes: Sequence[Probe]) -> list[int | None]:
    """Return for each of ``probes``, which have one key each, what :func:`held_prefix` does, in one round.

    Args:
        ask: probes the places given to it (:meth:`~tiering.medium.block_store.BlockStore.probe`).
        probes: the probes to run.
    """
    return [
        None if held is None else int(held) for held in ask([probe.place_of(probe.keys[0]) for probe in probes]).held
    ]


def _reach(held: int, end: int, width: int) -> list[int]:
    """Return positions from ``held`` on at exponentially growing distances, ending at the chain's last."""
    positions: list[int] = []
    step = 1
    while len(positions) < width and held + step - 1 < end - 1:
        positions.append(held + step - 1)
        step *= _GROWTH
    if len(positions) < width:
        positions.append(end - 1)
    return positions


def _narrow(held: int, missing: int, width: int) -> list[int]:
    """Return positions that divide the gap between ``held`` and ``missing`` evenly; all, if it is short."""
    gap = missing - held
    if gap <= width:
        return list(range(held, missing))
    return [held + gap * (part + 1) // (width + 1) for part in range(width)]
