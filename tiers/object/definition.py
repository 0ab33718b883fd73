"""The definition of the object store tier, and its naming of places."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tiering import ConfigError, ReqContext
from tiering.tier import (
    BlockTier,
    IoTask,
    Namespace,
    OffloadKey,
    SharedIndex,
    TierAdmin,
    TierContext,
    TierDefinition,
    TierStats,
)
from tiers.object.bucket_options import BucketOptions, ObjectOptions, S3Options, small_block_warning
from tiers.object.identity import BucketIdentity
from tiers.valkey.client import ServerAddress

if TYPE_CHECKING:
    from tiers.object.store import ObjectStore

logger = logging.getLogger("kv_tiering.object")


WAIT_PER_TOKEN = 5e-5
"""Seconds by which each token at stake extends the deadline of a lookup.

A GPU needs about twice this time to compute a token.
"""

MISSES_IN_A_ROW = 8
"""Number of lookups in a row that found nothing, after which a lookup probes its first block alone.

Each probed block is a request. A hit that comes after so many misses takes one round trip more to be found.
"""

TOKENS_PER_BLOCK = 16
"""Tokens of a block, if the namespace has no layout."""


class ObjectTier(BlockTier):
    """A block tier over a bucket.

    It warns once if blocks are small, and counts requests as the service does.
    """

    index: SharedIndex

    def __init__(self, context: TierContext, options: BucketOptions, store: ObjectStore) -> None:
        index = make_index(context, options, store)
        super().__init__(context, options, store, index, element_size=element_size(context.namespace))
        self._store = store
        self._renews = options.renewal_age is not None
        self._warning = small_block_warning(min(context.group_bytes))

    def on_opened(self, namespace: Namespace) -> None:
        super().on_opened(namespace)
        warning, self._warning = self._warning, None
        if warning is not None:
            logger.warning("tier %s: %s", self.name, warning)

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        if self.namespace is not None and self._renews:
            # The CPU tier holds these blocks, so no load shows their age in the bucket.
            run = partial(self._store.note_use, map(self.index.place_of, tuple(keys)))
            self.io.run(IoTask("renewal", run, lambda result, error: None, lookup=True))
        return super().used(keys, req_context)

    def get_stats(self) -> TierStats:
        stats = super().get_stats()
        self._store.requests.report(stats)
        return stats


def build(options: BucketOptions, context: TierContext) -> ObjectTier:
    """Return an object store tier that is not open yet.

    Raises:
        ConfigError: a package that the tier needs is missing.
    """
    _need_packages(options)
    from tiers.object.store import ObjectStore

    return ObjectTier(context, options, ObjectStore(options))


def make_admin(options: BucketOptions, replica: str | None) -> TierAdmin:
    """Return the administration of a bucket for the command line.

    Raises:
        ConfigError: a package that the tier needs is missing.
    """
    _need_packages(options)
    from tiers.object.command import ObjectAdmin

    return ObjectAdmin(options)


def _need_packages(options: BucketOptions) -> None:
    extra = "s3" if options.scheme == "s3" else "object"
    hint = f"install kv-tiering with its extra {extra} (in a clone: pip install '.[{extra}]')"
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the tier {options.tier_name} needs obstore; {hint}") from error
    if options.scheme == "s3":
        from tiers.object.s3.credentials import import_boto3

        import_boto3()


def make_index(context: TierContext, options: BucketOptions, store: ObjectStore) -> SharedIndex:
    """Return the index of a bucket, with coordination if the options name a server.

    Raises:
        ConfigError: a package that coordination needs is missing.
    """
    settings: dict[str, Any] = {
        "wait_per_block": WAIT_PER_TOKEN * tokens_per_block(context.namespace),
        "cautious_after": MISSES_IN_A_ROW,
        "on_absent": store.expect_absent,
    }
    if options.coordination is None:
        return SharedIndex.of(options, **settings)
    from tiers.coordination.coordinated import CoordinatedIndex
    from tiers.coordination.coordination import ValkeyCoordination

    coordination = ValkeyCoordination(
        context.name,
        ServerAddress.parse(options.coordination),
        BucketIdentity(store, writes=options.admission != "none").medium,
        store.list_places,
        ca_file=options.coordination_ca_file,
        announce=context.news.announce,
        on_absent=store.expect_absent,
    )
    settings |= {"coordination": coordination, "counts_touches": options.admission == "second_touch"}
    return CoordinatedIndex.of(options, **settings)


def tokens_per_block(namespace: Namespace) -> int:
    """Return the tokens of one block, read from the namespace."""
    layout = json.loads(namespace.settings).get("model", {}).get("layout")
    if not isinstance(layout, dict):
        return TOKENS_PER_BLOCK
    sizes = [int(size) for size in layout.get("gpu_block_size", ())]
    return min(sizes, default=TOKENS_PER_BLOCK) * int(layout.get("block_size_factor", 1))


def element_size(namespace: Namespace) -> int:
    """Return the bytes of one number in the KV cache, read from the namespace; default 2.

    Compression splits blocks into byte planes of this many bytes.
    """
    model = json.loads(namespace.settings).get("model", {})
    layout = model.get("layout")
    dtype = str(layout.get("kv_dtype") if isinstance(layout, dict) else model.get("dtype", "")).lower()
    if "8" in dtype:
        return 1
    return 4 if dtype.endswith("32") else 2


def _definition(options: type[BucketOptions]) -> TierDefinition:
    return TierDefinition(
        options=options,
        build=build,
        persistent=True,
        location=lambda options: options.location,
        distance="network",
        admin=make_admin,
    )


OBJECT_TIER = _definition(ObjectOptions)
"""The tier ``type: object``, for every cloud."""
S3_TIER = _definition(S3Options)
"""The tier ``type: s3``: the same for S3, with the bucket and the prefix as words of their own."""
