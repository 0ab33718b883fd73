"""Readers of traces: one request a line, read as a stream.

Three formats are recognised by the words of their first line:

- Mooncake: ``timestamp`` in milliseconds, ``input_length``, ``output_length``, ``hash_ids``; 512 tokens a block.
- Bailian (Qwen-Bailian usage traces): the same words, ``chat_id`` and others, ``timestamp`` in seconds; 16 tokens a
  block.
- The project's own (:func:`own_lines`): a line that describes the trace, then requests.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from tiering.errors import ConfigError
from tiering.replay.trace import TraceRequest, chained
from tiering.runtime.json_text import parse_json

FORMAT = "kv-tiering-trace"
"""Name of the project's own format, in the first line of a trace."""
VERSION = 1
"""Version of the project's own format."""
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's public traces."""
BAILIAN_BLOCK_TOKENS = 16
"""Tokens of a block in Bailian's public traces."""
REORDERED = 4096
"""Number of neighbouring requests that are sorted by their time.

A recorded trace lists requests in the order of their ends.
"""
MAX_LINE = 1 << 26
"""Largest length of a line in characters: a prompt of about four million blocks."""

MAX_TOKENS = 1 << 32
"""Largest length of a prompt or an answer in tokens; a longer one is a mistake."""

_HASH_DIGITS = 16

Parse = Callable[[Mapping[str, Any]], TraceRequest]
"""Function that turns the content of a line into a request."""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A description of a trace, known before its requests are read."""

    format: str
    """Name of the format: "mooncake", "bailian" or "kv-tiering-trace"."""
    block_tokens: int
    block_bytes: int | None = None
    """Bytes of one block's KV; None (default): the trace does not say."""


class Trace:
    """One or several files that are read as one trace, merged by time.

    Several files come from several engines, so equal hashes mean equal blocks in all of them.

    Args:
        paths: the files; those whose names end with ``.gz`` are decompressed.
        block_tokens: tokens of one block; None (default): those of the format.

    Raises:
        ConfigError: a file cannot be read or is no trace, or the files have blocks of different sizes.
    """

    def __init__(self, paths: Sequence[Path], block_tokens: int | None = None) -> None:
        self.paths = tuple(paths)
        infos = [_info(path, block_tokens) for path in paths]
        if not infos:
            raise ConfigError("a replay needs at least one trace")
        if len({info.block_tokens for info in infos}) > 1:
            sizes = ", ".join(f"{path}: {info.block_tokens}" for path, info in zip(paths, infos, strict=True))
            raise ConfigError(f"the traces have blocks of different sizes in tokens ({sizes}); replay them one by one")
        self.info = infos[0]
        self.bytes_read = 0
        """Characters read by the last iteration so far; compressed files count decompressed."""

    @property
    def total_bytes(self) -> int | None:
        """Size of all files, for progress; None if a file is compressed."""
        if any(path.suffix == ".gz" for path in self.paths):
            return None
        return sum(path.stat().st_size for path in self.paths)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Read all requests, in the order of their times.

        Raises:
            ConfigError: a line is no request, or a file cannot be read.
        """
        self.bytes_read = 0
        streams = [in_order(self._requests(path)) for path in self.paths]
        return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda request: request.time)

    def _requests(self, path: Path) -> Iterator[TraceRequest]:
        parse: Parse | None = None
        number = 0
        try:
            with _open(path) as file:
                while line := file.readline(MAX_LINE):
                    number += 1
                    self.bytes_read += len(line)
                    if line.isspace():
                        continue
                    try:
                        words = parse_json(line)
                    except ValueError:
                        if parse is _own and not line.endswith("\n") and not file.readline(1):
                            return  # the process that recorded the trace was killed while it wrote the last line
                        raise
                    if parse is None:
                        parse = _PARSERS[_recognised(path, words).format]
                        if "format" in words:
                            continue
                    yield _plausible(parse(words), self.info.block_tokens)
        except ConfigError:
            raise
        except (OSError, EOFError) as error:
            raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        except Exception as error:
            raise ConfigError(f"{path}, line {number}: is not a request of a trace: {_reason(error)}") from error


def in_order(requests: Iterable[TraceRequest], window: int = REORDERED) -> Iterator[TraceRequest]:
    """Sort requests by time within a window.

    A request that comes still later gets the time of the request before it.

    Args:
        requests: the requests, almost in order.
        window: number of requests that are held back.
    """
    heap: list[tuple[float, int, TraceRequest]] = []
    last = -math.inf

    def released() -> TraceRequest:
        nonlocal last
        time, _, request = heapq.heappop(heap)
        if time < last:
            request = TraceRequest(last, request.input_tokens, request.output_tokens, request.hashes)
        last = request.time
        return request

    for number, request in enumerate(requests):
        heapq.heappush(heap, (request.time, number, request))
        if len(heap) > window:
            yield released()
    while heap:
        yield released()


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _info(path: Path, block_tokens: int | None) -> TraceInfo:
    try:
        with _open(path) as file:
            line = next((line for line in iter(lambda: file.readline(MAX_LINE), "") if not line.isspace()), "")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not line:
        raise ConfigError(f"{path}: holds no request")
    try:
        words = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line 1: is not JSON: {error}; each line of a trace is one JSON object") from error
    info = _recognised(path, words)
    return info if block_tokens is None else TraceInfo(info.format, block_tokens, info.block_bytes)


def _recognised(path: Path, words: object) -> TraceInfo:
    """Return the description of a trace whose first line holds ``words``.

    Raises:
        ConfigError: the line is of no known format.
    """
    if isinstance(words, dict):
        if words.get("format") == FORMAT:
            return _own_info(path, words)
        if {"timestamp", "input_length", "output_length", "hash_ids"} <= words.keys():
            if "chat_id" in words:
                return TraceInfo("bailian", BAILIAN_BLOCK_TOKENS)
            return TraceInfo("mooncake", MOONCAKE_BLOCK_TOKENS)
    raise ConfigError(
        f"{path}: is not a known kind of trace; its first line must have timestamp, input_length, output_length and "
        f"hash_ids (the formats of Mooncake and Bailian), or format: {FORMAT}"
    )


def _own_info(path: Path, words: Mapping[str, Any]) -> TraceInfo:
    version, tokens, size = words.get("version"), words.get("block_tokens"), words.get("block_bytes")
    if version != VERSION:
        raise ConfigError(f"{path}: has version {version!r} of the format {FORMAT}; this program reads {VERSION}")
    if not (isinstance(tokens, int) and tokens > 0 and (size is None or (isinstance(size, int) and size > 0))):
        raise ConfigError(f"{path}: block_tokens and block_bytes in its first line must be numbers above 0")
    return TraceInfo(FORMAT, tokens, size)


def _public(words: Mapping[str, Any], seconds: float) -> TraceRequest:
    time = _time(words, "timestamp") * seconds
    return TraceRequest(
        time, _length(words, "input_length"), _length(words, "output_length"), chained(words["hash_ids"])
    )


def _time(words: Mapping[str, Any], name: str) -> float:
    """Return a finite time.

    Raises:
        ValueError: the time is infinite or no number.
    """
    time = float(words[name])
    if not math.isfinite(time):
        raise ValueError(f"{name} {time} is not a time")
    return time


def _length(words: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens.

    Raises:
        ValueError: no prompt and no answer has that many tokens.
    """
    tokens = int(words[name])
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{name} {tokens:.3g} is not a number of tokens from 0 to {MAX_TOKENS:,}")
    return tokens


def _plausible(request: TraceRequest, block_tokens: int) -> TraceRequest:
    """Return ``request``, whose hashes must not be more than the blocks of its prompt and its answer.

    Raises:
        ValueError: there are more hashes, so that a block has fewer tokens than the trace is said to have.
    """
    tokens, blocks = request.input_tokens + request.output_tokens, len(request.hashes)
    if blocks > -(-tokens // block_tokens):
        raise ValueError(
            f"{blocks:,} hashes are more than the blocks of {block_tokens} tokens in a prompt and an answer of "
            f"{tokens:,} tokens; if the blocks are smaller, give --block-tokens"
        )
    return request


def _own(words: Mapping[str, Any]) -> TraceRequest:
    text: str = words["hashes"]
    if len(text) % _HASH_DIGITS:
        raise ValueError(f"hashes has {len(text)} digits, not {_HASH_DIGITS} for each block")
    hashes = np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    return TraceRequest(_time(words, "time"), _length(words, "input_tokens"), _length(words, "output_tokens"), hashes)


_PARSERS: Mapping[str, Parse] = {
    "mooncake": lambda words: _public(words, 1e-3),
    "bailian": lambda words: _public(words, 1.0),
    FORMAT: _own,
}


def own_lines(requests: Iterable[TraceRequest], block_tokens: int, block_bytes: int | None = None) -> Iterator[str]:
    """Return the lines of a trace in the project's own format.

    Args:
        requests: the requests.
        block_tokens: tokens of one block.
        block_bytes: bytes of one block's KV; None (default): not known.
    """
    return chain([header_line(block_tokens, block_bytes)], map(request_line, requests))


def header_line(block_tokens: int, block_bytes: int | None) -> str:
    """Return the first line of a trace in the project's own format, without its end."""
    words = {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens, "block_bytes": block_bytes}
    return json.dumps(words)


def request_line(request: TraceRequest) -> str:
    """Return the line of a request in the project's own format, without its end."""
    return json.dumps(
        {
            "time": round(request.time, 6),
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "hashes": request.hashes.astype(">u8").tobytes().hex(),
        }
    )


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
