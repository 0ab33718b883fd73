"""The definition of the Valkey tier."""

from __future__ import annotations

from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.block_tier.definition import TierDefinition
from tiering.block_tier.tier import BlockTier
from tiering.errors import ConfigError
from tiering.index.shared import SharedIndex
from tiering.secondary.contract import TierContext
from tiers.valkey.store import ValkeyStore
from tiers.valkey.valkey_options import MAX_VALUE_BYTES, ValkeyOptions


def build(options: ValkeyOptions, context: TierContext) -> BlockTier:
    """Return a Valkey tier that is not open yet.

    Raises:
        ConfigError: the package ``valkey`` is missing, or a block is too large for a value of the server.
    """
    store = ValkeyStore(options)
    largest = max(context.group_bytes)
    if largest + store.traits.header_bytes > MAX_VALUE_BYTES:
        raise ConfigError(
            f"tier {context.name}: blocks of {format_bytes(largest)} exceed the {format_bytes(MAX_VALUE_BYTES)} of a "
            "server's value; lower block_size"
        )
    index = SharedIndex(
        present_ttl=options.present_ttl, absent_ttl=options.absent_ttl, lookup_deadline=options.lookup_deadline
    )
    return BlockTier(context, options, store, index)


def make_admin(options: ValkeyOptions, replica: str | None) -> TierAdmin:
    """Return the administration of a pool for the command line.

    Raises:
        ConfigError: the package ``valkey`` is missing.
    """
    from tiers.valkey.command import ValkeyAdmin

    return ValkeyAdmin(options, replica)


VALKEY_TIER = TierDefinition(
    options=ValkeyOptions,
    build=build,
    persistent=True,
    location=lambda options: options.location,
    distance="network",
    admin=make_admin,
)
