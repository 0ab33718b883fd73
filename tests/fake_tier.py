"""A fake of a user's own tier, ``tests.fake_tier:FAKE_TIER`` in a stack file, which holds no blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic import SecretStr, field_validator

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.block_tier.definition import TierDefinition
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierContext, TierTraits, TransferJob
from tiering.secondary.options import BlockTierOptions, SlotOptions


class FakeOptions(BlockTierOptions, SlotOptions):
    """The options of the fake tier.

    Attributes:
        opens: False: the tier cannot be opened.
        divisor: 0: the validator of this option raises.
        place_divisor: 0: the tier's location raises.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "ttl": "this fake does not age",
        "compression": "this fake compresses nothing",
    }

    path: str = ""
    opens: bool = True
    builds: bool = True
    access_key: str = ""
    session: SecretStr = SecretStr("")
    endpoint: str = ""
    divisor: float = 1.0
    place_divisor: float = 1.0

    @field_validator("divisor")
    @classmethod
    def _check_divisor(cls, divisor: float) -> float:
        return 1 / (1 / divisor)


class FakeTier(SecondaryTierManager):
    """A tier that accepts jobs, fails them at once, and records its calls in ``log``."""

    traits = TierTraits(medium="FAKE")
    definition: ClassVar[TierDefinition]

    def __init__(self, options: FakeOptions, context: TierContext) -> None:
        self.name = context.name
        self.options = options
        self.context = context
        self.log: list[str] = ["built"]
        self.open_deadlines: list[float] = []
        self._ended: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def submit_store(self, job: TransferJob) -> None:
        self._ended.append(JobResult(job.job_id, False))

    def submit_load(self, job: TransferJob) -> None:
        self._ended.append(JobResult(job.job_id, False))

    def get_finished(self) -> Iterable[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def open(self, deadline: float) -> bool:
        self.log.append("opened" if self.options.opens else "not opened")
        self.open_deadlines.append(deadline)
        return self.options.opens

    def shutdown(self, deadline: float) -> bool:
        self.log.append("shut down")
        return True


BUILT: list[FakeTier] = []
"""Every tier that was built; tests clear the list."""


def build(options: FakeOptions, context: TierContext) -> FakeTier:
    if not options.builds:
        raise OSError("this tier cannot be built")
    BUILT.append(FakeTier(options, context))
    return BUILT[-1]


def location(options: FakeOptions) -> str | None:
    parts = 1 / options.place_divisor
    return f"the directory {options.path}" if options.path and parts else None


FAKE_TIER = TierDefinition(FakeOptions, build, persistent=False, location=location)
PERSISTENT_FAKE = TierDefinition(FakeOptions, build, persistent=True, location=location)
FakeTier.definition = FAKE_TIER

NOT_A_TIER = object()
