"""Runs of described blocks as bytes, for a tier that keeps them until a restart.

The session of a run is left out: a later engine's announcement is not that session's.
"""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from tiering.connector.snapshots import RUN_BLOCKS, ExternalHash, ExtraKeys, Run

_RUN = struct.Struct("<IHHHI")
"""Bytes of the words; number of blocks; bytes of a key; those of a hash; number of tokens.

A hash of 0 bytes is a number of 8 bytes.
"""

_NUMBER_BYTES = 8
_MOST_TOKENS = 1 << 20
_MOST = 1 << 31
"""Bound of all other numbers, which the engine's publisher can send."""


def packed_size(run: Run) -> int:
    """Return about how many bytes a run takes."""
    first = run.hashes[0]
    hashes = len(run.hashes) * (len(first) if isinstance(first, bytes) else _NUMBER_BYTES)
    extra = 0 if run.extra_keys is None else 64 * sum(keys is not None for keys in run.extra_keys)
    return _RUN.size + 256 + len(run.keys) * len(run.keys[0]) + hashes + 4 * len(run.token_ids) + extra


def pack_runs(runs: Iterable[Run], most: int) -> bytes:
    """Return the leading runs that fit into ``most`` bytes, without runs that have no form as bytes."""
    parts: list[bytes] = []
    left = most
    for run in runs:
        packed = _pack(run)
        left -= len(packed)
        if left < 0:
            break
        parts.append(packed)
        time.sleep(0)
    return b"".join(parts)


def _pack(run: Run) -> bytes:
    hashes = run.hashes if run.parent is None else [*run.hashes, run.parent]
    try:
        numbers = [value for value in hashes if isinstance(value, int)]
        texts = [value for value in hashes if isinstance(value, bytes)]
        size = 0 if numbers else len(texts[0])
        packed = np.array(hashes, "<u8").tobytes() if numbers and not texts else b"".join(texts)
        tokens = np.array(run.token_ids, np.int64)
        if (numbers and texts) or len({len(text) for text in texts}) > 1 or not _are_u32(tokens):
            return b""
        words = {
            "factor": run.factor,
            "block_size": run.block_size,
            "lookahead": run.lookahead,
            "group_idx": run.group_idx,
            "kind": run.kind,
            "window": run.window,
            "lora_id": run.lora_id,
            "lora_name": run.lora_name,
            "has_parent": run.parent is not None,
            "extra_keys": None if run.extra_keys is None else list(run.extra_keys),
        }
        text = json.dumps(words, default=_as_json).encode()
    except (OverflowError, TypeError, ValueError):
        return b""
    head = _RUN.pack(len(text), len(run.keys), len(run.keys[0]), size, len(tokens))
    return b"".join([head, text, *run.keys, packed, tokens.astype("<u4").tobytes()])


def _are_u32(tokens: Any) -> bool:
    return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < 1 << 32)


def _as_json(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    raise TypeError


def unpack_runs(data: bytes) -> list[Run]:
    """Return the runs in ``data``.

    Raises:
        ValueError: the data are not those of :func:`pack_runs`.
    """
    runs: list[Run] = []
    start = 0
    try:
        while start < len(data):
            run, start = _unpack(data, start)
            runs.append(run)
            time.sleep(0)
    except (struct.error, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"a run at byte {start} is damaged: {error}") from error
    return runs


def _unpack(data: bytes, start: int) -> tuple[Run, int]:
    """Return the run at ``start``, and the position after it."""
    length, blocks, key_size, hash_size, count = _RUN.unpack_from(data, start)
    at = start + _RUN.size
    if not 0 < blocks <= RUN_BLOCKS or not key_size or count > _MOST_TOKENS or at + length > len(data):
        raise ValueError("its sizes are not those of a run")
    words = json.loads(data[at : at + length])
    at += length
    factor, size, lookahead, group = (
        _number(words[name]) for name in ("factor", "block_size", "lookahead", "group_idx")
    )
    hashes = blocks * factor + bool(words["has_parent"])
    end = at + blocks * key_size + hashes * (hash_size or _NUMBER_BYTES) + 4 * count
    least = blocks * factor * size
    if min(factor, size) < 1 or not least <= count <= least + lookahead or end > len(data):
        raise ValueError("its sizes do not agree")
    keys = [data[key : key + key_size] for key in range(at, at + blocks * key_size, key_size)]
    at += blocks * key_size
    found: list[ExternalHash]
    if hash_size:
        found = [data[name : name + hash_size] for name in range(at, at + hashes * hash_size, hash_size)]
    else:
        found = np.frombuffer(data, "<u8", hashes, at).tolist()
    tokens = array("q", np.frombuffer(data, "<u4", count, end - 4 * count).astype(np.int64).tobytes())
    extra = words["extra_keys"]
    run = Run(
        keys=keys,
        hashes=found[: blocks * factor],
        parent=found[-1] if words["has_parent"] else None,
        token_ids=tokens,
        extra_keys=None if extra is None else [_extra(value) for value in extra],
        factor=factor,
        block_size=size,
        lookahead=lookahead,
        group_idx=group,
        kind=_text(words["kind"]),
        window=None if words["window"] is None else _number(words["window"]),
        lora_id=None if words["lora_id"] is None else _number(words["lora_id"]),
        lora_name=_text(words["lora_name"]),
    )
    if run.extra_keys is not None and len(run.extra_keys) != len(run.hashes):
        raise ValueError("its extra keys are not one per hash")
    return run, end


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is no number below {_MOST}")
    return value


def _text(value: Any) -> str | None:
    if value is not None and type(value) is not str:
        raise ValueError(f"{value!r} is no text")
    return value


def _extra(value: Any) -> ExtraKeys:
    return None if value is None else tuple(_key(key) for key in value)


def _key(value: Any) -> object:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if isinstance(value, list):
        return tuple(_key(part) for part in value)
    if type(value) is int and value < 0:
        return -_number(-value)  # an image may begin before its block
    return value if isinstance(value, str) else _number(value)
