"""Two doubles of KV-aware routers, by the scoring rules that llm-d and Dynamo publish.

Written from the rules of https://github.com/llm-d/llm-d-kv-cache (``pkg/kvcache``, ``pkg/kvevents``, June 2026) and
https://github.com/ai-dynamo/dynamo (``lib/kv-router``: ``indexer``, ``zmq_wire``, ``scheduling/overlap.rs``, of 2026).
Both index the engines' events by their tokens, in blocks of one size, and choose the engine with the largest score for
the tokens of a prompt. The load of the engines, which both add to the score, is the same for all here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAIN_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention", None)


class Prompt(NamedTuple):
    """A prompt, as a router gets it."""

    tokens: Sequence[int]
    lora: str | None = None
    extra: Sequence[Any] = ()
    """Extra keys of each block, which the engine hashes beside its tokens; missing entries: none."""


class Router(ABC):
    """An index of the blocks of several engines.

    Args:
        block: tokens in a block.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    @abstractmethod
    def apply(self, engine: str, event: Any) -> None:
        """Process one event of an engine."""

    @abstractmethod
    def leave(self, engine: str) -> None:
        """Forget an engine that has ended."""

    @abstractmethod
    def scores(self, prompt: Prompt) -> dict[str, float]:
        """Return the score of each engine that holds the beginning of the prompt."""

    def best(self, prompt: Prompt) -> str | None:
        """Return the engine with the largest score; None if no engine, or more than one, has it."""
        ordered = sorted(self.scores(prompt).items(), key=lambda item: -item[1])
        if not ordered or (len(ordered) > 1 and ordered[0][1] == ordered[1][1]):
            return None
        return ordered[0][0]

    def chunks(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the whole blocks of ``tokens``."""
        return [tuple(tokens[at : at + self.block]) for at in range(0, len(tokens) - self.block + 1, self.block)]


class LlmdRouter(Router):
    """llm-d's index and its scorer "LongestPrefix".

    A *request key* is a hash of the key before, the tokens, the model or adapter, and the texts among the extra keys.
    An event without tokens counts only if an event with tokens came before for the same engine hash; one with an
    unknown parent is left out. The score is the sum of weights of the leading blocks, per block the largest of the
    media that hold it.

    Args:
        weights: weight by medium in small letters; a medium that is not there weighs 1.
    """

    def __init__(self, block: int, weights: dict[str, float]) -> None:
        super().__init__(block)
        self.weights = weights
        self._keys: dict[Any, list[Hashable]] = {}
        """Request keys of an engine hash."""
        self._pods: defaultdict[Hashable, set[tuple[str, str]]] = defaultdict(set)

    def _request_keys(
        self, parent: Hashable, tokens: Sequence[int], model: str, extra: Sequence[Any]
    ) -> list[Hashable]:
        keys, texts = list[Hashable](), [_texts(entry) for entry in extra]
        for number, chunk in enumerate(self.chunks(tokens)):
            parent = hash((parent, chunk, model, texts[number] if number < len(texts) else ()))
            keys.append(parent)
        return keys

    def apply(self, engine: str, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.leave(engine)
            return
        pod = (engine, (event.medium or "GPU").lower())
        if kind == "BlockRemoved":
            for name in event.block_hashes:
                for key in self._keys.get(name, ()):
                    self._pods[key].discard(pod)
            return
        parent: Hashable = None
        if event.parent_block_hash is not None:
            if event.parent_block_hash not in self._keys:
                return
            parent = self._keys[event.parent_block_hash][-1]
        keys = self._request_keys(parent, event.token_ids, event.lora_name or "", event.extra_keys or ())
        if keys:
            longer = max(len(keys), len(event.block_hashes))
            found: dict[Any, list[Hashable]] = {}
            for at in range(longer):
                name = event.block_hashes[at * len(event.block_hashes) // longer]
                found.setdefault(name, []).append(keys[at * len(keys) // longer])
            self._keys |= found
        elif not event.token_ids:
            keys = [self._keys[name][-1] for name in event.block_hashes if name in self._keys]
        for key in keys:
            self._pods[key].add(pod)

    def leave(self, engine: str) -> None:
        for pods in self._pods.values():
            pods -= {pod for pod in pods if pod[0] == engine}

    def scores(self, prompt: Prompt) -> dict[str, float]:
        scores: defaultdict[str, float] = defaultdict(float)
        active: set[str] | None = None
        for key in self._request_keys(None, prompt.tokens, prompt.lora or "", prompt.extra):
            best: dict[str, float] = {}
            for engine, medium in self._pods.get(key, ()):
                best[engine] = max(best.get(engine, 0.0), self.weights.get(medium, 1.0))
            active = set(best) if active is None else active & set(best)
            if not active:
                break
            for engine in active:
                scores[engine] += best[engine]
        return dict(scores)


def _texts(entry: Any) -> tuple[str, ...]:
    """Return the texts among a block's extra keys, which may be pairs (identifier, offset)."""
    found = []
    for value in entry or ():
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            found.append(value[0])
    return tuple(found)


SALT = "dynamo-cache-salt:"
"""Prefix by which Dynamo marks the cache salts of its requests."""

TIERS = {"GPU": 0, None: 0, "CPU": 1, "STORAGE": 2}
"""Place of a medium in Dynamo's order of tiers: device, host and disk."""

CREDITS = (1.0, 0.75, 0.25)
"""Dynamo's default credit of a block by tier."""


@dataclass(frozen=True)
class _Block:
    """A block in one tier of one engine."""

    parent: Any
    local: Hashable


class DynamoRouter(Router):
    """Dynamo's index of tiers.

    A block is found by its parent's engine hash and a hash of its tokens, its adapter, its images and its marked salt,
    which counts for the first block only.
    Events without tokens, of another block size, of remote media or of other than main attention are left out. A lower
    tier counts for the blocks that follow those of the tiers above it.
    """

    def __init__(self, block: int) -> None:
        super().__init__(block)
        self._blocks: defaultdict[tuple[str, int], dict[Any, _Block]] = defaultdict(dict)
        self._next: defaultdict[tuple[str, int], dict[_Block, Any]] = defaultdict(dict)

    def _local(self, chunk: tuple[int, ...], lora: str | None, entry: Any, namespace: str | None) -> Hashable:
        images = tuple(value[0] for value in entry or () if isinstance(value, (list, tuple)))
        return hash((chunk, lora, images, namespace))

    def apply(self, engine: str, event: Any) -> None:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self._clear(engine, 0)
            return
        if event.locality not in (None, "LOCAL"):
            return
        place = (engine, TIERS[event.medium])
        blocks, following = self._blocks[place], self._next[place]
        if kind == "BlockRemoved":
            for name in event.block_hashes:
                if (block := blocks.pop(name, None)) is not None:
                    following.pop(block, None)
            return
        if event.kv_cache_spec_kind not in MAIN_ATTENTION or event.block_size != self.block:
            return
        parent = event.parent_block_hash
        if parent is not None and place[1] == 0 and parent not in blocks:
            return
        namespace = _namespace(event.extra_keys)
        for number, (name, chunk) in enumerate(zip(event.block_hashes, self.chunks(event.token_ids), strict=False)):
            entry = event.extra_keys[number] if event.extra_keys else None
            salt = namespace if number == 0 else None
            block = _Block(parent, self._local(chunk, event.lora_name, entry, salt))
            blocks[name], following[block] = block, name
            parent = name

    def _clear(self, engine: str, tier: int) -> None:
        self._blocks.pop((engine, tier), None)
        self._next.pop((engine, tier), None)

    def leave(self, engine: str) -> None:
        for tier in range(len(CREDITS)):
            self._clear(engine, tier)

    def scores(self, prompt: Prompt) -> dict[str, float]:
        namespace = _namespace(prompt.extra)
        chunks = self.chunks(prompt.tokens)
        locals_ = []
        for number, chunk in enumerate(chunks):
            entry = prompt.extra[number] if number < len(prompt.extra) else None
            locals_.append(self._local(chunk, prompt.lora, entry, namespace if number == 0 else None))
        scores: dict[str, float] = {}
        for engine in {engine for engine, _ in self._blocks}:
            at, parent, score = 0, None, 0.0
            for tier, credit in enumerate(CREDITS):
                following = self._next.get((engine, tier), {})
                while at < len(locals_) and (name := following.get(_Block(parent, locals_[at]))) is not None:
                    at, parent, score = at + 1, name, score + credit
            if score:
                scores[engine] = score
        return scores


def _namespace(extra: Any) -> str | None:
    for value in (extra[0] if extra else None) or ():
        if isinstance(value, str) and value.startswith(SALT):
            return value.removeprefix(SALT)
    return None
