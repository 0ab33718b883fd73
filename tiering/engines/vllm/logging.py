"""Where our log lines go in vLLM's processes: vLLM gives handlers to its own logger only, so that ours would not be seen."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

OURS = "kv_tiering"
"""The name of the logger above all loggers of this project."""


def share_logging(engine: logging.Logger, environment: Mapping[str, str] = os.environ) -> bool:
    """Let our lines go where ``engine``'s go, from the same level on; returns whether that was set up, now or by an earlier call.

    Does nothing if somebody has configured logging for us: a handler on our logger or above it, or
    ``VLLM_CONFIGURE_LOGGING=0``; nor if ``engine`` has no handlers.  A level that our logger has already is kept.
    Harmless if repeated.
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
