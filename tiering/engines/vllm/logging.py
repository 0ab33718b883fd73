"""The routing of our log lines in vLLM's processes.

vLLM gives handlers to its own logger only, so without this module our lines would not appear.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

OURS = "kv_tiering"
"""Name of the parent logger of all loggers of this project."""


def share_logging(engine: logging.Logger, environment: Mapping[str, str] = os.environ) -> bool:
    """Send our log lines to the handlers of ``engine``, from the same level on.

    Nothing changes if logging is configured for us already: by a handler on our logger or above it, or by
    ``VLLM_CONFIGURE_LOGGING=0``. The same holds if ``engine`` has no handlers. A level that our logger already has is
    kept. Repeated calls change nothing.

    Args:
        engine: vLLM's logger.
        environment: environment variables; default: those of the process.

    Returns:
        True if our lines go to the handlers of ``engine``, through this call or an earlier one.
    """
    ours = engine.manager.getLogger(OURS)
    if ours.handlers:
        return ours.handlers == engine.handlers
    if ours.hasHandlers() or not engine.handlers or environment.get("VLLM_CONFIGURE_LOGGING", "1").strip() == "0":
        return False
    for handler in engine.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(engine.level)
    ours.propagate = False
    return True
