"""A tier without an engine: blocks move between rows and the tier through all of its layers."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.request import ReqContext
from tiering.api.units import format_bytes
from tiering.config.registry import tier_definition
from tiering.errors import RegionError, StoreError, TemporaryStoreError
from tiering.primary.memory.room import available_bytes, cgroup_free_bytes
from tiering.runtime.news import News
from tiering.secondary.contract import JobResult, SecondaryTierManager, TierContext, TransferJob
from tiering.secondary.options import TierOptions

OPEN_SECONDS = 30.0
"""Seconds within which a tier must come into service."""
CLOSE_SECONDS = 30.0
"""Seconds within which a tier must shut down."""
REVISION = "kv-tiering"
"""Revision of the scratch blocks, for tiers that need one."""

_POLL_SECONDS = 0.05
_REQUEST = ReqContext("kv-tiering")


def scratch_key(number: int) -> OffloadKey:
    """Return a key that no engine uses."""
    return make_offload_key(f"kv-tiering {number:021d}".encode(), 0)


def eager(options: TierOptions) -> TierOptions:
    """Return the options of a tier that stores and loads every block it is given."""
    words = {"admission": "all", "min_prefix_blocks": 1}
    known = type(options).model_fields
    return options.model_copy(update={word: value for word, value in words.items() if word in known})


class TierDriver:
    """One tier with rows of its own. Use it as a context manager, from one thread.

    Raises:
        RegionError: there is not enough memory for the rows, and for a tier whose blocks are in memory.
    """

    def __init__(self, options: TierOptions, block_bytes: int, num_rows: int) -> None:
        definition = tier_definition(options.type)
        stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        needed = num_rows * stride + (options.capacity_bytes or 0 if definition.distance == "process" else 0)
        # The kernel promises more memory than it has.
        free = min((room for room in (available_bytes(), cgroup_free_bytes()) if room is not None), default=needed)
        if needed > free:
            raise RegionError(
                f"{num_rows} rows for blocks of {format_bytes(block_bytes)} need {format_bytes(needed)} of memory, and "
                f"{format_bytes(free)} are available"
            )
        self.block_bytes = block_bytes
        self.rows: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, num_rows * stride), np.uint8).reshape(
            num_rows, stride
        )
        """The rows, shape (num_rows, row bytes)."""
        model = ModelIdentity(name="kv-tiering", weights="none", dtype="none", layout=f"blocks of {block_bytes}")
        self._news = News()
        self.tier: SecondaryTierManager = definition.build(
            options,
            TierContext(
                name=options.tier_name,
                primary_view=self.rows.data,
                group_bytes=(block_bytes,),
                namespace=Namespace.build(model, (block_bytes,)),
                news=self._news,
                revision=REVISION,
                distance=definition.distance,
            ),
        )
        """The tier that is driven, built but not opened."""
        self._jobs = 0
        self._ended = threading.Event()
        self._listening = ExitStack()

    def __enter__(self) -> Self:
        """Open the tier.

        Raises:
            StoreError: the tier did not come into service.
        """
        try:
            if not self.tier.open(time.monotonic() + OPEN_SECONDS):
                error = self.tier.open_error
                if isinstance(error, StoreError):
                    raise error
                raise TemporaryStoreError(
                    f"the tier did not come into service within {OPEN_SECONDS:g} s"
                    + ("" if error is None else f": {error}")
                )
        except BaseException:
            self.tier.shutdown(time.monotonic() + CLOSE_SECONDS)
            raise
        self._listening.enter_context(self._news.listening(self._ended.set))
        self.tier.on_new_request(_REQUEST)
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.tier.shutdown(time.monotonic() + CLOSE_SECONDS)

    def submit(self, keys: Sequence[OffloadKey], rows: Sequence[int], *, load: bool) -> int:
        """Submit a job and return its number.

        Args:
            keys: keys of the blocks.
            rows: row of each block.
            load: True to fill the rows, False to store them.
        """
        self._jobs += 1
        now = time.monotonic()
        deadline = self.tier.traits.deadline(now, load=load)
        job = TransferJob(self._jobs, list(keys), np.asarray(rows, np.int64), load, _REQUEST, now, deadline=deadline)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.on_schedule_end()
        return self._jobs

    def finished(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call, after a short wait if there are none."""
        self._ended.clear()
        results = list(self.tier.get_finished())
        if not results:
            self._ended.wait(_POLL_SECONDS)
            results = list(self.tier.get_finished())
        self.tier.on_schedule_end()
        return results

    def move(self, keys: Sequence[OffloadKey], rows: Sequence[int], *, load: bool, timeout: float) -> list[OffloadKey]:
        """Move blocks by one job, and return the keys of those that were moved.

        Raises:
            TemporaryStoreError: the job did not end in time.
        """
        number = self.submit(keys, rows, load=load)
        end = time.monotonic() + timeout
        while True:
            for result in self.finished():
                if result.job_id == number:
                    if result.successful_keys is not None:
                        return list(result.successful_keys)
                    return list(keys) if result.success else []
            if time.monotonic() > end:
                raise TemporaryStoreError(f"a {'load' if load else 'store'} did not end within {timeout:g} s")
