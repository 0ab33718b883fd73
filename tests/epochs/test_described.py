"""Documents that describe blocks: their names, their form, and what is refused."""

from __future__ import annotations

import struct

import pytest
from xxhash import xxh3_128

from tests.block_tier.fakes import make_namespace
from tiering.epochs.described import (
    MAX_BYTES,
    MAX_CONTENT,
    described_document,
    pack,
    parse,
)
from tiering.epochs.documents import hint_namespace

NAMESPACE = make_namespace().with_epoch(b"e" * 16)


def test_a_document_comes_back_with_its_number() -> None:
    assert parse(pack(NAMESPACE, 7, b"runs"), NAMESPACE) == (7, b"runs")
    assert parse(pack(NAMESPACE, 0, b""), NAMESPACE) == (0, b"")


def test_the_largest_content_fits_and_a_larger_document_is_refused() -> None:
    assert len(pack(NAMESPACE, 1, bytes(MAX_CONTENT))) == MAX_BYTES
    assert parse(pack(NAMESPACE, 1, bytes(MAX_CONTENT)), NAMESPACE) == (1, bytes(MAX_CONTENT))
    assert parse(pack(NAMESPACE, 1, bytes(MAX_CONTENT + 1)), NAMESPACE) is None


def test_of_another_epoch_or_a_later_release_nothing_is_read() -> None:
    document = pack(NAMESPACE, 7, b"runs")
    assert parse(document, NAMESPACE.with_epoch(b"f" * 16)) is None
    later = bytearray(document[:-16])
    struct.pack_into("<H", later, 8, 2)
    assert parse(bytes(later) + xxh3_128(bytes(later)).digest(), NAMESPACE) is None


@pytest.mark.parametrize("cut", [0, 1, 16, 39, -1])
def test_a_torn_document_is_refused(cut: int) -> None:
    assert parse(pack(NAMESPACE, 7, b"runs")[:cut], NAMESPACE) is None


def test_no_changed_byte_is_read() -> None:
    document = pack(NAMESPACE, 7, b"runs")
    for position in range(len(document)):
        changed = bytearray(document)
        changed[position] ^= 1
        assert parse(bytes(changed), NAMESPACE) is None


def test_names_hold_the_namespace() -> None:
    assert hint_namespace(described_document(NAMESPACE, 3)) == NAMESPACE.directory
    for name in ("described-", f"hot-{NAMESPACE.directory}-03", f"described-{NAMESPACE.directory}-3", "described-x-03"):
        assert hint_namespace(name) is None
