"""Small traces for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tiering.replay.trace import TraceRequest, chained

BLOCK_TOKENS = 10
BLOCK_BYTES = 1 << 20


def request(time: float, ids: Iterable[int], output: int = 1) -> TraceRequest:
    """Return a request whose prompt is whole blocks."""
    hashes = chained(ids)
    return TraceRequest(time, len(hashes) * BLOCK_TOKENS, output, hashes)


def public_line(timestamp: float, ids: Sequence[int], **more: object) -> str:
    words = {"timestamp": timestamp, "input_length": 512 * len(ids), "output_length": 7, "hash_ids": ids, **more}
    return json.dumps(words) + "\n"


def write_mooncake(path: Path, prompts: Sequence[Sequence[int]], every_ms: int = 1000) -> Path:
    path.write_text("".join(public_line(number * every_ms, ids) for number, ids in enumerate(prompts)))
    return path
