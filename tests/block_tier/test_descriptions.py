"""A block tier's documents with descriptions of its blocks: when they are written and read."""

from __future__ import annotations

import os

import pytest

from tests.block_tier.rig import Rig
from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.epochs.described import MOST_SLOTS, described_document, pack
from tiering.errors import TemporaryStoreError


def part_of(rig: Rig) -> TierDescriptions:
    part = rig.tier.traits.descriptions
    assert part is not None
    return part


def write(rig: Rig, *contents: bytes) -> None:
    documents = [Description(slot, slot + 1, lambda c=content: c) for slot, content in enumerate(contents)]  # type: ignore[misc]
    assert part_of(rig).write(documents)
    rig.io.run_tasks()
    rig.io.poll()


def gather(rig: Rig) -> list[Described[bytes]] | None:
    def read(content: bytes) -> bytes:
        if content == b"damaged":
            raise ValueError("damaged")
        return content

    assert part_of(rig).gather(read) is None
    rig.io.run_tasks()
    rig.io.poll()
    found = part_of(rig).gather(read)
    return None if found is None else list(found)


def test_what_was_written_is_read() -> None:
    rig = Rig().opened()
    write(rig, b"one", b"two")
    assert gather(rig) == [Described(0, 1, b"one"), Described(1, 2, b"two")]
    assert rig.tier.get_stats().descriptions_written == 2


def test_a_medium_that_an_older_release_has_written_has_none() -> None:
    assert gather(Rig().opened()) == []


def test_documents_that_do_not_count_are_counted_and_the_others_read() -> None:
    rig = Rig().opened()
    namespace = rig.tier.namespace
    assert namespace is not None
    write(rig, b"one", b"damaged")
    rig.store.write_document(described_document(namespace, 5), pack(namespace.with_epoch(b"x" * 16), 9, b"old"))
    rig.store.write_document(described_document(namespace, 6), b"torn")
    assert gather(rig) == [Described(0, 1, b"one")]
    assert rig.tier.get_stats().descriptions_refused == 3


def test_before_the_tier_serves_nothing_is_written_or_known() -> None:
    rig = Rig()
    assert not part_of(rig).write([Description(0, 1, lambda: b"one")])
    assert part_of(rig).gather(bytes) is None
    assert rig.io.ran == []


def test_one_writing_at_a_time() -> None:
    rig = Rig().opened()
    part = part_of(rig)
    assert part.write([Description(0, 1, lambda: b"one")])
    assert part.writing
    assert not part.write([Description(0, 2, lambda: b"two")])
    rig.io.run_tasks()
    rig.io.poll()
    assert not part.writing


def test_a_medium_that_does_not_take_documents_costs_nothing_but_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig().opened()

    def refuse(name: str, data: bytes) -> None:
        raise TemporaryStoreError("no room")

    monkeypatch.setattr(rig.store, "write_document", refuse)
    for _ in range(3):
        write(rig, b"one")
    assert len(caplog.records) == 1
    assert rig.tier.get_stats().descriptions_written == 0


def test_on_a_shared_medium_there_are_no_descriptions() -> None:
    assert Rig(shared=True).tier.traits.descriptions is None


def test_the_documents_are_few_beside_the_capacity() -> None:
    assert 2 <= part_of(Rig()).slots <= MOST_SLOTS


def test_a_forked_child_writes_nothing() -> None:
    rig = Rig().opened()
    part = part_of(rig)
    child = os.fork()
    if child == 0:
        os._exit(int(part.write([Description(0, 1, lambda: b"one")]) or part.gather(bytes) != ()))
    assert os.waitpid(child, 0)[1] == 0
    write(rig, b"one")
    assert rig.tier.get_stats().descriptions_written == 1
