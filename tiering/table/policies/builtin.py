"""The eviction policies that ship with the project, and the search for a policy by its name."""

from __future__ import annotations

import importlib

from tiering.errors import ConfigError
from tiering.table.policies.arc import ARCEvictionPolicy
from tiering.table.policies.policy import EvictionPolicy
from tiering.table.policies.recency import LRUEvictionPolicy

BUILTIN_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUEvictionPolicy, "arc": ARCEvictionPolicy}
"""The policies that ship with the project, by name."""


def load_policy(name: str) -> type[EvictionPolicy]:
    """Return the policy called ``name``: "lru", "arc" or ``module:Class``.

    Raises:
        ConfigError: the policy is unknown or cannot be imported; the message lists the allowed names.
    """
    if name in BUILTIN_POLICIES:
        return BUILTIN_POLICIES[name]
    module_name, colon, class_name = name.partition(":")
    allowed = f"{', '.join(BUILTIN_POLICIES)} or module:Class"
    if not colon:
        raise ConfigError(f"eviction: {name!r} is not a policy; allowed are {allowed}")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"eviction: {name!r} cannot be imported ({type(error).__name__}: {error}); allowed are {allowed}"
        ) from error
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise ConfigError(f"eviction: {name!r} is not a subclass of tiering.table.policies.policy.EvictionPolicy")
    return policy
