"""The check of the connector's configuration when vLLM looks up its class, before weights are loaded.

vLLM builds its connectors after it has loaded the weights, and calls no earlier method of a connector that sees the
configuration on every platform. But vLLM looks the class up while it builds its own configuration, in the front end's
process. The connector's configuration is then a local variable of the calling function, and vLLM's own configuration is
the caller. An invalid stack or parallelism is refused there, and its message is the last line of the error. If a vLLM
version looks classes up in another way, nothing is checked here; its connectors refuse both when they are built.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from tiering.config.inline import NO_EVENTS
from tiering.engines.vllm.callers import variables_of
from tiering.engines.vllm.refusals import check_one_stage, check_parallel, check_role
from tiering.errors import ConfigError, TieringError
from tiering.simple.selection import simple_options
from tiering.spec import read_stack

CONNECTOR = "TieringConnector"
"""Name of the class in vLLM's configuration."""

_VARIABLE = "kv_transfer_config"
"""Name of the local variable with the configuration, in vLLM's functions that look connectors up."""
_DEPTH = 8
"""Number of callers whose local variables are examined."""


class StartupError(TieringError):
    """A start of vLLM that cannot work with this connector; the text says what to change.

    The error is no ValueError, because vLLM's configuration classes wrap a ValueError in a text of their own.
    """


class LookupCheck:
    """The check of connector configurations, once for each configuration."""

    def __init__(self) -> None:
        self._checked: set[str] = set()

    def check(self, caller: FrameType | None) -> None:
        """Check the configuration for which ``caller`` looks up the connector's class, if there is one.

        Args:
            caller: the stack frame that looks up the class.

        Raises:
            StartupError: the stack, the role or the parallelism is invalid, or a ``MultiConnector`` names the
                connector twice.
        """
        configs = list(_configs(caller))
        if not configs or getattr(configs[0], "kv_connector", None) != CONNECTOR:
            return
        if any(_named_twice(config) for config in configs[1:]):
            raise StartupError(
                f"MultiConnector: names {CONNECTOR} more than once; "
                "write all tiers into one stack, which may have any number"
            )
        try:
            for parallel in _parallel_configs(caller):
                check_parallel(parallel)
        except ConfigError as error:
            raise StartupError(str(error)) from None
        extra = getattr(configs[0], "kv_connector_extra_config", None)
        if not isinstance(extra, Mapping):
            return
        known = json.dumps(extra, sort_keys=True, default=str)
        if known in self._checked:
            return
        try:
            check_role(configs[0])
            simple = simple_options(extra)
            if simple is not None:
                for parallel in _parallel_configs(caller):
                    check_one_stage(parallel)
            if (read_stack(extra) if simple is None else simple).events:
                raise ConfigError(f"events: {NO_EVENTS}; leave it out")
        except ConfigError as error:
            raise StartupError(str(error)) from None
        self._checked.add(known)


def _configs(frame: FrameType | None) -> Iterator[Any]:
    """Yield the distinct connector configurations among the callers' local variables, the innermost first."""
    before = None
    for variables in variables_of(frame, _DEPTH):
        found = variables.get(_VARIABLE)
        if found is not None and found is not before:
            yield found
        before = found if found is not None else before


def _parallel_configs(frame: FrameType | None) -> Iterator[Any]:
    """Yield the configurations of parallelism of the callers that have a connector's configuration too."""
    for variables in variables_of(frame, _DEPTH):
        owner = variables.get("self")
        parallel = getattr(owner, "parallel_config", None)
        if parallel is not None and hasattr(owner, _VARIABLE):
            yield parallel


def _named_twice(config: Any) -> bool:
    children: Iterable[Any] = (getattr(config, "kv_connector_extra_config", None) or {}).get("connectors") or ()
    names = [child.get("kv_connector") for child in children if isinstance(child, Mapping)]
    return names.count(CONNECTOR) > 1
