"""Words of stacks for the tests of their reading, and the refusal of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError

FAKE = "tests.fake_tier:FAKE_TIER"
PRIMARY = {"capacity": "1MiB"}

Write = Callable[[Any], Path]
"""Function that writes a stack file and returns its path."""


def refusal(stack: object) -> str:
    """Return the message with which ``stack`` is refused."""
    with pytest.raises(ConfigError) as caught:
        load_stack(stack)  # type: ignore[arg-type]
    return str(caught.value)
