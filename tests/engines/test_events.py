"""KV events in vLLM's form, with the classes and functions of its releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tiering.connector.event_types import BlockRemoved, BlockStored
from tiering.engines.vllm.events import EventConverter, engine_events

OLD_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
NEW = ("group_idx", "locality", "ownership")


def struct(*fields: str) -> Any:
    class Struct(SimpleNamespace):
        __struct_fields__ = fields

        def __init__(self, *values: object, **named: object) -> None:
            super().__init__(**dict(zip(fields, values, strict=False)), **named)

    return Struct


def module(stored: tuple[str, ...], removed: tuple[str, ...]) -> Any:
    return SimpleNamespace(BlockStored=struct(*stored), BlockRemoved=struct(*removed))


STORED = BlockStored(
    [b"a"], None, [1, 2], 2, None, "STORAGE", None, [None], 0, "full_attention", None, "REMOTE", "s3", "chat"
)
REMOVED = BlockRemoved([b"a"], "STORAGE", 0, "REMOTE", "s3")


def test_fields_that_a_release_does_not_have_are_left_out() -> None:
    convert = EventConverter(module(OLD_STORED, ("block_hashes", "medium")))
    assert set(vars(convert(STORED))) == set(OLD_STORED)
    assert vars(convert(REMOVED)) == {"block_hashes": [b"a"], "medium": "STORAGE"}


def test_fields_that_a_release_has_are_told() -> None:
    convert = EventConverter(module((*OLD_STORED, "extra_keys", *NEW, "session_id"), ("block_hashes", "medium", *NEW)))
    told = convert(STORED)
    assert (told.medium, told.locality, told.ownership, told.extra_keys) == ("STORAGE", "REMOTE", "s3", [None])
    assert told.session_id == "chat"
    assert vars(convert(REMOVED)) == {
        "block_hashes": [b"a"],
        "medium": "STORAGE",
        "group_idx": 0,
        "locality": "REMOTE",
        "ownership": "s3",
    }


def test_fields_in_another_order_are_told_by_their_names() -> None:
    convert = EventConverter(
        module(("medium", "session_id", "ownership", "block_hashes"), ("ownership", "block_hashes"))
    )
    assert vars(convert(STORED)) == {
        "medium": "STORAGE",
        "session_id": "chat",
        "ownership": "s3",
        "block_hashes": [b"a"],
    }
    assert vars(convert(REMOVED)) == {"ownership": "s3", "block_hashes": [b"a"]}


class Utils:
    """vLLM's functions that make extra keys.

    Attributes:
        asked: arguments (start, end, feature) of each call.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def maybe_convert_block_hash(self, block_hash: bytes) -> bytes:
        return block_hash

    def generate_block_hash_extra_keys(self, request: Any, start: int, end: int, feature: int) -> tuple[Any, int]:
        self.asked.append((start, end, feature))
        return (("cache_salt", request.cache_salt),) if start == 0 else None, feature + 1


class Utils033(Utils):
    def generate_lookahead_block_hash_extra_keys(
        self, request: Any, start: int, end: int, hash_end: int, feature: int
    ) -> tuple[Any, int]:
        self.asked.append((start, end, hash_end, feature))
        return None, feature

    def to_event_extra_keys(self, keys: list[Any]) -> list[Any]:
        return [("published", key) for key in keys]


SALTED: Any = SimpleNamespace(cache_salt="s", lora_request=None, mm_features=[], prompt_embeds=None)


def test_extra_keys_come_from_vllm_s_own_function_block_by_block() -> None:
    utils = Utils()
    events = engine_events(utils, SimpleNamespace())
    assert events.extra_keys is not None
    assert events.extra_keys(SALTED, 0, 3, 16) == [(("cache_salt", "s"),), None, None]
    assert utils.asked == [(0, 16, 0), (16, 32, 1), (32, 48, 2)]


def test_extra_keys_are_told_in_the_form_of_vllm_s_own_events() -> None:
    utils = Utils033()
    events = engine_events(utils, SimpleNamespace(num_hash_lookahead_tokens=0))
    assert events.extra_keys is not None
    assert events.extra_keys(SALTED, 1, 1, 16) == [("published", None)]


def test_hashes_that_look_ahead_are_asked_for_as_vllm_does() -> None:
    utils = Utils033()
    events = engine_events(utils, SimpleNamespace(num_hash_lookahead_tokens=3))
    assert events.extra_keys is not None
    events.extra_keys(SALTED, 1, 1, 16)
    assert (utils.asked, events.lookahead_tokens) == ([(16, 32, 35, 0)], 3)


def test_requests_with_nothing_but_tokens_cost_no_call() -> None:
    utils = Utils()
    events = engine_events(utils, SimpleNamespace())
    plain: Any = SimpleNamespace(cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None)
    assert events.extra_keys is not None
    assert events.extra_keys(plain, 0, 2, 16) == [None, None]
    assert utils.asked == []
