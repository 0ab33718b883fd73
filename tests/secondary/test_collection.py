"""The collection of a medium's listed blocks by epoch, age and total size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tiering.secondary.admin.contract import (
    Collected,
    EpochState,
    KnownNamespace,
    Limits,
    StoredBlock,
    TierAdmin,
    UnsupportedError,
)
from tiers.memory import MemoryOptions

NOW = 1_000_000.0
HOUR = 3600.0
OPTIONS = MemoryOptions(type="memory")


class ListedAdmin(TierAdmin):
    """Blocks by place: age in hours, size, and epoch."""

    def __init__(self, blocks: dict[str, tuple[float, int, str]]) -> None:
        super().__init__(OPTIONS)
        self.clock = lambda: NOW
        self.stored = blocks
        self.batches: list[int] = []

    async def namespaces(self) -> list[KnownNamespace]:
        states = {"now": EpochState.CURRENT, "mine": EpochState.LEASED, "old": EpochState.ABANDONED}
        return [KnownNamespace("ns", {}, states)]

    async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        for place, (hours, size, epoch) in sorted(self.stored.items()):
            yield StoredBlock(NOW - hours * HOUR, place, size, "ns" if epoch != "other" else "other", epoch)

    async def remove(self, blocks: Sequence[StoredBlock]) -> None:
        self.batches.append(len(blocks))
        for block in blocks:
            del self.stored[block.place]


def collect(admin: TierAdmin, *, dry_run: bool = False, **limits: object) -> Collected:
    return asyncio.run(admin.collect(Limits(**limits), dry_run=dry_run))  # type: ignore[arg-type]


def test_by_age() -> None:
    admin = ListedAdmin({"a": (5, 10, "now"), "b": (1, 10, "now"), "c": (3, 10, "now")})
    assert collect(admin, older_than=2 * HOUR) == Collected(3, 30, 2, 20)
    assert list(admin.stored) == ["b"]


def test_by_size_the_oldest_first() -> None:
    admin = ListedAdmin({"a": (5, 10, "now"), "b": (1, 10, "now"), "c": (3, 10, "now")})
    assert collect(admin, max_total=25) == Collected(3, 30, 1, 10)
    assert list(admin.stored) == ["b", "c"]


def test_what_goes_by_age_counts_for_the_size() -> None:
    admin = ListedAdmin({"a": (5, 10, "now"), "b": (1, 10, "now"), "c": (3, 10, "now")})
    assert collect(admin, older_than=4 * HOUR, max_total=20).removed_blocks == 1


def test_abandoned_epochs_after_the_grace_time() -> None:
    admin = ListedAdmin(
        {
            "current": (90, 1, "now"),
            "leased": (90, 1, "mine"),
            "old": (90, 1, "old"),
            "unknown": (90, 1, "other"),
            "young": (1, 1, "old"),
            "no frame": (90, 1, ""),
        }
    )
    assert collect(admin, older_than=None).removed_blocks == 0
    assert collect(admin, abandoned=True, grace=2 * HOUR).removed_blocks == 2
    assert sorted(admin.stored) == ["current", "leased", "no frame", "young"]


def test_a_dry_run_removes_nothing() -> None:
    admin = ListedAdmin({"a": (5, 10, "now")})
    assert collect(admin, max_total=1, dry_run=True).removed_blocks == 1
    assert list(admin.stored) == ["a"]


def test_in_batches_that_services_take() -> None:
    admin = ListedAdmin({f"{at:04}": (1, 1, "now") for at in range(2500)})
    collect(admin, max_total=0)
    assert admin.batches == [1000, 1000, 500]


def test_a_namespace_is_cleared_without_the_others() -> None:
    admin = ListedAdmin({"a": (5, 10, "now"), "b": (1, 10, "other")})
    assert asyncio.run(admin.clear("ns", dry_run=True)).removed_blocks == 1
    assert asyncio.run(admin.clear("ns", dry_run=False)) == Collected(2, 20, 1, 10)
    assert list(admin.stored) == ["b"]


def test_a_tier_without_an_administration_refuses_by_a_typed_error() -> None:
    plain = TierAdmin(OPTIONS)
    with pytest.raises(UnsupportedError, match="memory cannot list its blocks"):
        collect(plain, abandoned=True)
    with pytest.raises(UnsupportedError, match="keeps no epochs"):
        asyncio.run(plain.begin_epoch("0" * 32))
