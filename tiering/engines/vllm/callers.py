"""The local variables of this project's callers, for what vLLM passes on in no other way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any


def variables_of(frame: FrameType | None, most: int = 12) -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of a stack frame and of its callers, the innermost first.

    Args:
        frame: the frame.
        most: number of frames that are examined at most; default: 12.
    """
    for _ in range(most):
        if frame is None:
            return
        yield frame.f_locals
        frame = frame.f_back
