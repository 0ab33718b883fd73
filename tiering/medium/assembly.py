"""Assembly of a tier's I/O side: the only place where the layers around a block store are stacked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tiering.medium.block_store import BlockStore
from tiering.medium.host import BATCH_UNIT_BYTES, LEAST_UNIT_BYTES, SINGLE_UNIT_BYTES, IoHost
from tiering.medium.layers.attempts import DeadlineLayer, IoStats, MeterLayer, RetryLayer
from tiering.medium.layers.breaker import BreakerLayer, Breakers
from tiering.medium.pipeline import Pipeline
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions, CompressionOptions


def build_io_host(
    store: BlockStore,
    options: BlockTierOptions,
    context: TierContext,
    *,
    element_size: int = 2,
    sleep: Callable[[float], object] | None = None,
) -> IoHost:
    """Build the I/O side of one tier around ``store``, without opening or starting anything.

    The layers are retry(breaker(deadline(meter(store)))). A pipeline uses them, in as many threads at once as
    ``options.max_inflight`` allows.

    Args:
        store: the medium, without layers.
        options: options of the tier.
        context: environment of the tier.
        element_size: bytes of one KV element, by which compression splits; default 2.
        sleep: function that waits for some seconds; default: a wait that ends early when the host is closed.

    Raises:
        ConfigError: the store or the installation does not support the compression.
    """
    clock, stopping = context.clock, threading.Event()
    stats = IoStats()
    breakers = Breakers.build(options.breaker, name=context.name, clock=clock)
    metered = MeterLayer(store, stats, clock=clock)
    guarded = BreakerLayer(DeadlineLayer(metered, clock=clock), breakers)
    layered = RetryLayer(
        guarded,
        options.retries,
        stats,
        clock=clock,
        sleep=stopping.wait if sleep is None else sleep,
        stopping=stopping.is_set,
    )
    pipeline = Pipeline(
        layered,
        context.primary_view,
        name=context.name,
        breakers=breakers,
        stats=stats,
        clock=clock,
        compress=isinstance(options, CompressionOptions) and options.compression == "zstd",
        element_size=element_size,
    )
    return IoHost(
        pipeline,
        name=context.name,
        depth=options.depth,
        clock=clock,
        unit_bytes=BATCH_UNIT_BYTES if store.traits.batches else SINGLE_UNIT_BYTES,
        least_unit_bytes=LEAST_UNIT_BYTES if store.traits.batches else 0,
        stopping=stopping,
        news=context.news,
    )
