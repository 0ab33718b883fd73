"""Documents with speeds: their names, their form, and what is refused."""

from __future__ import annotations

import math
import struct

import pytest
from xxhash import xxh3_128

from tests.block_tier.fakes import make_namespace
from tiering.epochs.documents import hint_namespace
from tiering.epochs.speeds import (
    DOCUMENT_BYTES,
    SPEED_SECONDS,
    pack,
    parse,
    speeds_document,
)
from tiering.secondary.speeds import Speeds

NAMESPACE = make_namespace().with_epoch(b"e" * 16)
SPEEDS = Speeds(0.01, 0.002, 0.0005)
DOCUMENT = pack(NAMESPACE, "machine", 1000.0, SPEEDS)


def test_a_document_comes_back_in_every_epoch_until_it_expires() -> None:
    assert len(DOCUMENT) == DOCUMENT_BYTES < 200
    for now in (1000.0, 1000.0 + SPEED_SECONDS, 1000.0 - SPEED_SECONDS):
        assert parse(DOCUMENT, NAMESPACE.with_epoch(b"f" * 16), "machine", now) == SPEEDS
    for now in (1001.0 + SPEED_SECONDS, 999.0 - SPEED_SECONDS, math.nan):
        assert parse(DOCUMENT, NAMESPACE, "machine", now) is None


def test_of_another_namespace_or_machine_or_a_later_release_nothing_is_read() -> None:
    other = make_namespace(group_bytes=(1,))
    assert parse(DOCUMENT, other, "machine", 1000.0) is None
    assert parse(DOCUMENT, NAMESPACE, "another machine", 1000.0) is None
    later = bytearray(DOCUMENT[:-16])
    struct.pack_into("<H", later, 8, 2)
    assert parse(bytes(later) + xxh3_128(bytes(later)).digest(), NAMESPACE, "machine", 1000.0) is None


@pytest.mark.parametrize("cut", [0, 1, 16, 40, -1])
def test_a_torn_document_is_refused(cut: int) -> None:
    assert parse(DOCUMENT[:cut], NAMESPACE, "machine", 1000.0) is None


def test_no_changed_byte_is_read() -> None:
    for position in range(len(DOCUMENT)):
        changed = bytearray(DOCUMENT)
        changed[position] ^= 1
        assert parse(bytes(changed), NAMESPACE, "machine", 1000.0) is None


@pytest.mark.parametrize(
    "speeds",
    [
        (0.0, 0.0, 0.0),
        (-1.0, 0.0, 0.0),
        (math.nan, 0.0, 0.0),
        (0.1, math.inf, 0.0),
        (0.1, 0.0, -0.1),
        (4000.0, 0.0, 0.0),
    ],
)
def test_speeds_that_cannot_be_are_refused(speeds: tuple[float, float, float]) -> None:
    assert parse(pack(NAMESPACE, "machine", 1000.0, Speeds(*speeds)), NAMESPACE, "machine", 1000.0) is None


def test_names_hold_the_namespace() -> None:
    assert hint_namespace(speeds_document(NAMESPACE, "machine")) == NAMESPACE.directory
    assert speeds_document(NAMESPACE, "machine") != speeds_document(NAMESPACE, "another machine")
    for name in ("speeds-", f"speed-{NAMESPACE.directory}-{'0' * 16}", f"speeds-x-{'0' * 16}"):
        assert hint_namespace(name) is None
