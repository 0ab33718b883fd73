"""Documents with hot keys: their order, their bounds, and what does not count."""

from __future__ import annotations

import struct

import pytest
from xxhash import xxh3_128

from tests.block_tier.fakes import make_namespace
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.epochs.documents import hint_namespace
from tiering.epochs.hot_keys import (
    HOT_SECONDS,
    LONGEST_RUN,
    MAX_BYTES,
    hot_document,
    hot_documents,
    pack,
    parse,
    runs_of,
)
from tiering.testing.keys import keys_of

NAMESPACE = make_namespace().next_epoch()
NOW = 1_700_000_000.0
K = keys_of(*range(400))


def pause() -> None:
    """Let nothing run in between."""


def parsed(data: bytes, now: float = NOW) -> list[list[OffloadKey]] | None:
    runs = parse(data, NAMESPACE, now)
    return None if runs is None else [list(run) for run in runs]


def test_a_document_returns_its_runs_and_long_ones_in_parts() -> None:
    data = pack(NAMESPACE, NOW, [K[:3], K[3:140], K[140:141]])
    assert LONGEST_RUN == 64
    assert parsed(data) == [K[:3], K[3:67], K[67:131], K[131:140], K[140:141]]


def test_shared_blocks_come_first_and_then_the_rest_by_its_last_use() -> None:
    system, old, new = K[:2], K[2:4], K[4:6]
    chains = [tuple(system + old), tuple(system + new)]
    assert runs_of(chains, pause) == [system, new, old]


def test_blocks_that_were_used_once_are_in_the_order_of_their_last_use() -> None:
    assert runs_of([(K[0],), tuple(K[1:3]), (K[3],)], pause) == [[K[3]], K[1:3], [K[0]]]


def test_the_keys_of_each_group_are_runs_of_their_own() -> None:
    full, window = ([make_offload_key(bytes([n]) * 16, group) for n in range(3)] for group in (0, 1))
    mixed = [key for pair in zip(full, window, strict=True) for key in pair]
    assert runs_of([tuple(mixed)], pause) == [full, window]


def test_other_threads_run_between_the_parts_of_prefixes_that_bring_nothing_new_too() -> None:
    pauses: list[int] = []
    runs_of([tuple(K)] * 100, lambda: pauses.append(1))
    assert len(pauses) >= 3 * 100 * len(K) // 1024


def test_short_prefixes_do_not_pause_more_often_than_long_ones() -> None:
    pauses: list[int] = []
    runs_of([(key,) for key in keys_of(*range(10_000))], lambda: pauses.append(1))
    assert 3 * 10_000 // 1024 <= len(pauses) <= 3 * 10_000 // 500


def test_a_document_has_at_most_512_kib_and_drops_the_coldest() -> None:
    many = keys_of(*range(40_000))
    data = pack(NAMESPACE, NOW, [many[:10], many[10:]])
    found = parsed(data)
    assert found is not None
    flat = [key for run in found for key in run]
    assert MAX_BYTES - 100 < len(data) <= MAX_BYTES
    assert flat == many[: len(flat)]


def test_keys_of_another_length_are_left_out_and_no_keys_are_no_document() -> None:
    assert parsed(pack(NAMESPACE, NOW, [K[:1], [b"short"], K[1:2]])) == [K[:1], K[1:2]]
    assert pack(NAMESPACE, NOW, []) == b""


@pytest.mark.parametrize("off", [HOT_SECONDS + 1, -HOT_SECONDS - 1])
def test_a_stale_document_does_not_count_nor_one_from_the_future(off: float) -> None:
    data = pack(NAMESPACE, NOW, [K[:3]])
    assert parsed(data, NOW + off / 2) is not None
    assert parsed(data, NOW + off) is None


def test_a_document_of_another_epoch_or_namespace_does_not_count() -> None:
    for other in (NAMESPACE.next_epoch(), make_namespace("demo", (8192,)).next_epoch()):
        assert parsed(pack(other, NOW, [K[:3]])) is None


def test_a_document_with_a_bit_flipped_or_cut_anywhere_does_not_count() -> None:
    data = pack(NAMESPACE, NOW, [K[:3], K[3:5]])
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert parsed(bytes(flipped)) is None
        assert parsed(data[:position]) is None


def with_digest(body: bytes) -> bytes:
    return body + xxh3_128(body).digest()


LIES = {
    "another version": (8, "<H", 2),
    "no length of keys": (10, "<H", 0),
    "more runs than bytes": (16, "<I", 1 << 31),
    "more keys than bytes": (20, "<I", 1 << 31),
    "a time that is no number": (40, "<d", float("nan")),
    "a run longer than the keys": (48, "<I", 1 << 31),
    "an empty run": (48, "<I", 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_with_a_correct_checksum_does_not_count(lie: str) -> None:
    offset, layout, value = LIES[lie]
    body = bytearray(pack(NAMESPACE, NOW, [K[:3], K[3:5]])[:-16])
    assert parsed(with_digest(bytes(body))) is not None
    struct.pack_into(layout, body, offset, value)
    assert parsed(with_digest(bytes(body))) is None


def test_a_document_that_is_too_large_is_not_parsed() -> None:
    data = pack(NAMESPACE, NOW, [keys_of(*range(40_000))])
    assert parsed(with_digest(data[:-16] + bytes(MAX_BYTES))) is None


def test_the_name_holds_the_namespace_and_tells_engines_apart() -> None:
    one, two = hot_document(NAMESPACE, "one"), hot_document(NAMESPACE, "two")
    assert one != two
    assert one.startswith(hot_documents(NAMESPACE))
    assert hint_namespace(one) == NAMESPACE.directory
    assert hint_namespace(f"epoch-{NAMESPACE.directory}") is None
