"""KV events as vLLM publishes them over ZeroMQ, compared with those of its own cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.vllm.models import write_adapter
from tests.vllm.rig import BLOCK, Engine, engine, prompt, whole_blocks

PROMPTS = [prompt(seed) for seed in range(3)]
LATER = [prompt(seed, 500) for seed in range(20, 24)]
"""Prompts with more blocks than the CPU tier has rows."""
PLAIN: dict[str, Any] = {"primary": {"capacity": "1500KiB"}}
DESCRIBED = {**PLAIN, "block_size": 2 * BLOCK, "self_describing_kv_events": True}
WITH_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
GPU, CPU, DISK = "GPU", "CPU", "STORAGE"


class Subscriber:
    """A consumer of a publisher's events.

    Attributes:
        heard: all events so far, in their order.
    """

    def __init__(self, endpoint: str) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.heard: list[Any] = []

    def hears(self, milliseconds: int) -> bool:
        """Receive one batch; return False if none comes in time."""
        if not self._socket.poll(milliseconds):
            return False
        _, _, payload = self._socket.recv_multipart()
        self.heard += self._decode(payload).events
        return True

    def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            assert self.hears(20_000), f"not enough after {len(self.heard)} events"

    def stored(self, medium: str) -> list[Any]:
        return [event for event in self.heard if type(event).__name__ == "BlockStored" and event.medium == medium]

    def announced(self, medium: str) -> set[Any]:
        """Return the own (last) hashes of all blocks that were ever stored on the medium."""
        return {event.block_hashes[-1] for event in self.stored(medium)}

    def held(self, medium: str) -> set[Any]:
        """Return the hashes on the medium, by applying the events in order and counting references."""
        held: Counter[Any] = Counter()
        for event in self.heard:
            if getattr(event, "medium", None) != medium:
                continue
            if type(event).__name__ == "BlockStored":
                held.update(event.block_hashes)
            else:
                assert all(held[name] > 0 for name in event.block_hashes)
                held.subtract(event.block_hashes)
        return set(+held)

    def extra_keys(self, medium: str) -> dict[Any, Any]:
        """Return the keys that vLLM hashed in addition to the tokens, by hash."""
        return {
            name: keys
            for event in self.stored(medium)
            for name, keys in zip(event.block_hashes, event.extra_keys or [None] * len(event.block_hashes), strict=True)
        }

    def close(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def publishing(
    model: Path, directory: Path, options: Mapping[str, Any] = MappingProxyType(WITH_ADAPTERS), **stack: Any
) -> Iterator[tuple[Engine, Subscriber]]:
    """An engine with a CPU tier and a local one, and a subscriber to all of its events.

    Args:
        model: the model.
        directory: place of the local tier and of the events' socket.
        options: further options of the engine; default: those for adapters.
        stack: further words of the stack.
    """
    from vllm.config import KVEventsConfig

    endpoint = f"ipc://{directory}/events"
    tier = {"type": "local", "path": str(directory / "disk"), "capacity": "64MiB"}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    subscriber = Subscriber(endpoint)
    try:
        with engine(model, {"secondary": [tier], **stack}, kv_events_config=events, **options) as running:
            seeds = count(30_000)
            while not subscriber.hears(200):  # until the publisher knows the subscription
                running.ask([prompt(next(seeds), 40)], 1, {"kv_tiering": {"load": False, "store": False}})
            yield running, subscriber
    finally:
        subscriber.close()


@pytest.fixture(scope="module", params=[PLAIN, DESCRIBED], ids=["plain", "self-describing, two blocks"])
def published(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Subscriber, int]]:
    """An engine, its subscriber, and the size of an offloaded block in tokens."""
    with publishing(llama, tmp_path_factory.mktemp("events"), **request.param) as (running, subscriber):
        yield running, subscriber, request.param.get("block_size", BLOCK)


def blocks_of(
    subscriber: Subscriber, prompts: Sequence[list[int]], size: int
) -> dict[Any, tuple[list[Any], Any, list[int]]]:
    """Return (hashes, parent, tokens) of each whole block of ``size`` tokens by the block's own hash.

    The hashes are those that vLLM announces for its own cache.
    """
    known = {}
    for event in subscriber.stored(GPU):
        parents = [event.parent_block_hash, *event.block_hashes]
        for number, (parent, block) in enumerate(zip(parents, event.block_hashes, strict=False)):
            known[parent, tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK])] = block
    found: dict[Any, Any] = {}
    for tokens in prompts:
        parent = None
        for start in range(0, len(tokens) - size + 1, size):
            hashes = [parent]
            for at in range(start, start + size, BLOCK):
                hashes.append(known[hashes[-1], tuple(tokens[at : at + BLOCK])])
            found[hashes[-1]] = hashes[1:], parent, tokens[start : start + size]
            parent = hashes[-1]
    return found


def test_what_tiers_gain_is_announced_by_the_hashes_of_vllms_own_cache(
    published: tuple[Engine, Subscriber, int],
) -> None:
    running, subscriber, size = published
    running.ask(PROMPTS)
    running.settle()
    subscriber.until(lambda: len(subscriber.announced(DISK)) >= whole_blocks(PROMPTS, size) * BLOCK // size)
    own = blocks_of(subscriber, PROMPTS, size)
    assert subscriber.announced(CPU) == subscriber.announced(DISK) == set(own)
    kinds = {(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in subscriber.stored(GPU)}
    for event in subscriber.stored(CPU) + subscriber.stored(DISK):
        assert (event.group_idx, event.lora_id, event.lora_name) == (0, None, None)
        assert getattr(event, "session_id", None) is None  # a field of vLLM 0.30 and later
        if size == BLOCK:
            assert (event.block_size, event.token_ids, event.parent_block_hash) == (0, [], None)
        else:
            assert (event.block_hashes, event.parent_block_hash, event.token_ids) == own[event.block_hashes[-1]]
            assert event.block_size == BLOCK
            assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) in kinds


def test_who_applies_the_events_knows_what_each_tier_holds(published: tuple[Engine, Subscriber, int]) -> None:
    running, subscriber, size = published
    for tokens in LATER:  # one at a time: a block without room while its request runs is not stored
        running.ask([tokens], 1)
        running.settle()
    blocks = whole_blocks(PROMPTS + LATER, size) * BLOCK // size
    subscriber.until(lambda: len(subscriber.announced(DISK)) >= blocks)
    manager = running.connector.scheduler_half.get_stats()["manager"]
    described = size > BLOCK
    hashes_per_block = size // BLOCK if described else 1
    assert (
        len(subscriber.held(CPU))
        == (manager["rows"] - manager["rows_free"]) * hashes_per_block
        < blocks * hashes_per_block
    )
    known = blocks_of(subscriber, PROMPTS + LATER, size)
    assert subscriber.held(DISK) == {
        name for hashes, _, _ in known.values() for name in (hashes if described else hashes[-1:])
    }
    assert {(event.locality, event.ownership) for event in subscriber.stored(DISK)} == {("LOCAL", "local")}
    assert {(event.locality, event.ownership) for event in subscriber.stored(CPU)} == {("LOCAL", None)}

    assert running.llm.reset_prefix_cache(reset_connector=True)
    running.ask([prompt(1, 8)], 1)
    subscriber.until(lambda: not subscriber.held(DISK) and not subscriber.held(CPU))


def test_blocks_of_an_adapter_are_announced_with_its_name_and_number_where_they_describe_themselves(
    published: tuple[Engine, Subscriber, int], tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    running, subscriber, size = published
    adapter = LoRARequest("parrot", 7, str(write_adapter(tmp_path / "parrot", 1)))
    # The first request of an adapter is stored once the workers have identified the adapter, in part or not at all.
    start, first, prompts = len(subscriber.heard), prompt(59), [prompt(seed) for seed in range(60, 62)]
    running.ask([first], lora=adapter)
    running.settle()
    running.ask(prompts, lora=adapter)
    running.settle()
    del subscriber.heard[:start]
    subscriber.until(lambda: len(subscriber.announced(DISK)) >= whole_blocks(prompts, size) * BLOCK // size)
    wanted, own = blocks_of(subscriber, prompts, size), blocks_of(subscriber, [first, *prompts], size)
    subscriber.until(lambda: set(wanted) <= subscriber.announced(CPU) & subscriber.announced(DISK))
    assert {(event.lora_id, event.lora_name) for event in subscriber.stored(GPU)} == {(7, "parrot")}
    assert subscriber.announced(CPU) | subscriber.announced(DISK) <= set(own)
    for event in subscriber.stored(CPU):
        if size == BLOCK:
            assert (event.lora_id, event.lora_name, event.token_ids) == (None, None, [])
        else:
            assert (event.lora_id, event.lora_name) == (7, "parrot")
            assert (event.block_hashes, event.parent_block_hash, event.token_ids) == own[event.block_hashes[-1]]


def test_salted_requests_are_announced_with_what_vllm_hashed_beside_their_tokens(
    published: tuple[Engine, Subscriber, int],
) -> None:
    running, subscriber, size = published
    start = len(subscriber.heard)
    prompts = [prompt(seed) for seed in range(70, 72)]
    running.ask(prompts, salt="tenant 7")
    running.settle()
    del subscriber.heard[:start]
    blocks = whole_blocks(prompts, size) * BLOCK // size
    subscriber.until(lambda: min(len(subscriber.announced(CPU)), len(subscriber.announced(DISK))) >= blocks)
    own = subscriber.extra_keys(GPU)
    assert set(own.values()) - {None}, "the salt is hashed"
    for medium in (CPU, DISK):
        told = subscriber.extra_keys(medium)
        assert told == ({name: own[name] for name in told} if size > BLOCK else dict.fromkeys(told))
