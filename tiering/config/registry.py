"""The registry of tier types, the only place that names the tiers that ship with the project."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from tiering.api.masking import shown
from tiering.block_tier.definition import TierDefinition
from tiering.errors import ConfigError

TIER_TYPES: Mapping[str, tuple[str, str]] = {
    "memory": ("tiers.memory:MEMORY_TIER", ""),
    "local": ("tiers.local:LOCAL_TIER", ""),
    "object": ("tiers.object:OBJECT_TIER", "object"),
    "s3": ("tiers.object:S3_TIER", "s3"),
    "mooncake": ("tiers.mooncake:MOONCAKE_TIER", "mooncake"),
    "valkey": ("tiers.valkey:VALKEY_TIER", "valkey"),
}
"""Registered name → import path of its :class:`TierDefinition`, and the extra that it needs.

The extra is empty for a tier without further dependencies.
"""


def tier_definition(kind: object) -> TierDefinition:
    """Return the definition of a tier's ``type``.

    Args:
        kind: a registered name, or ``module.path:Name`` for a custom tier. ``Name`` is a :class:`TierDefinition`, or a
            class (such as a SecondaryTierManager) whose attribute ``definition`` is one.

    Raises:
        ConfigError: the type is unknown, cannot be imported, or is not a tier; the message names the allowed types.
    """
    allowed = f"{', '.join(TIER_TYPES)}, or module.path:Name for a custom tier"
    if not isinstance(kind, str) or (kind not in TIER_TYPES and ":" not in kind):
        near = difflib.get_close_matches(str(kind), TIER_TYPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{shown(kind)} is not a type of tier{hint}; allowed are {allowed}")
    target, extra = TIER_TYPES.get(kind, (kind, ""))
    module_name, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        hint = f"; install kv-tiering with its extra {extra} (in a clone: pip install '.[{extra}]')" if extra else ""
        raise ConfigError(f"the tier {shown(kind)} cannot be imported: {error}{hint}") from error
    except AttributeError as error:
        raise ConfigError(f"the module {module_name} has no {shown(name)}") from error
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(f"the tier {shown(kind)} cannot be imported: {type(error).__name__}: {error}") from error
    definition = found if isinstance(found, TierDefinition) else getattr(found, "definition", None)
    if not isinstance(definition, TierDefinition):
        raise ConfigError(
            f"{shown(kind)} is neither a tiering.TierDefinition nor a class with one as its attribute definition"
        )
    return definition
