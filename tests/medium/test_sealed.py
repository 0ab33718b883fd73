"""Small documents: what was packed is read, and nothing else is."""

from __future__ import annotations

import hashlib

import pytest

from tests.block_tier.fakes import make_namespace
from tiering.epochs import described, documents, hot_keys, speeds
from tiering.medium.sealed import SealedLayout
from tiering.secondary.speeds import Speeds
from tiers.local import bad_slots
from tiers.object import identity, suspects

LAYOUT = SealedLayout(b"KVTEST\x01\x00", "HxxQ")
DOCUMENT = LAYOUT.pack(7, 1 << 40, content=b"content")
NAMESPACE = make_namespace().with_epoch(b"e" * 16)
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(5)]


def test_fields_and_content_come_back() -> None:
    assert LAYOUT.parse(DOCUMENT) == ((7, 1 << 40), b"content")
    assert len(DOCUMENT) == LAYOUT.size + len(b"content")
    assert LAYOUT.parse(LAYOUT.pack(0, 0)) == ((0, 0), b"")


def test_no_changed_byte_and_no_torn_document_is_read() -> None:
    for position in range(len(DOCUMENT)):
        changed = bytearray(DOCUMENT)
        changed[position] ^= 1
        assert LAYOUT.parse(bytes(changed)) is None
        assert LAYOUT.parse(DOCUMENT[:position]) is None


def test_another_version_is_not_read() -> None:
    assert SealedLayout(b"KVTEST\x02\x00", "HxxQ").parse(DOCUMENT) is None


@pytest.mark.parametrize(
    ("document", "digest"),
    [
        (described.pack(NAMESPACE, 7, b"runs"), "33b30ccc377af9a6"),
        (hot_keys.pack(NAMESPACE, 1e9, [KEYS[:3], KEYS[3:]]), "3d6ff1730795d362"),
        (speeds.pack(NAMESPACE, "machine", 1000.0, Speeds(0.01, 0.002, 0.0005)), "73959b361c0763f2"),
        (documents.EpochDocument.of(NAMESPACE, "r", private=True).pack(), "1daf18d96eeb079a"),
        (
            documents.EpochDocument.of(
                NAMESPACE, None, private=False, common={b"a" * 16: b"b" * 16}, invalidations=[b"c" * 16]
            ).pack(),
            "00caea5911d0518a",
        ),
        (identity.pack(b"i" * 16), "ef18a8d4e9491b02"),
        (
            suspects.Note(b"p" * 16, b"v" * 16, b"c" * 16, suspects.Machine((b"1" * 8, b"2" * 8, b"3" * 8))).pack(),
            "9e10eade6f8492bc",
        ),
        (bad_slots.encode([(3, 1, 5.0), (9, 2, 7.5)]), "1a60bf3d6a41ab92"),
    ],
    ids=["described", "hot keys", "speeds", "epoch", "epoch with common ones", "identity", "note", "bad slots"],
)
def test_the_bytes_on_the_medium_are_those_of_the_version_before(document: bytes, digest: str) -> None:
    assert hashlib.sha256(document).hexdigest()[:16] == digest
