"""The conformance suite of block stores: the guarantees of :mod:`tiering.medium.block_store`.

The suite checks a store against its medium. Subclass :class:`BlockStoreTests` in a pytest module, make the store there,
and reach its medium without the store::

   class TestMyStore(BlockStoreTests):
       @pytest.fixture(autouse=True)
       def _medium(self, tmp_path): self.path = tmp_path
       def make_store(self): return MyStore(self.path)
       def raw_read(self, place): ...
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from tiering.errors import PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import BlockStore, Done, Place
from tiering.testing.frames import block_to_get, block_to_put, frame_bytes, is_verified

DOCUMENT = "conformance-1.json"


class RawMedium(ABC):
    """The medium of a test: the raw methods reach it without the store or tier that is tested."""

    shared: ClassVar[bool] = False
    """True if several processes share the medium and places are names; default: False, places are slots.

    Shared media are also tested for probe and delete, and for resets, which leave the others their blocks.
    """
    persistent: ClassVar[bool] = True
    """True if a store or tier that is made later finds the blocks of a closed one; default: True."""

    @abstractmethod
    def raw_read(self, place: Place) -> bytes | None:
        """Return the frame at ``place``, header first; None if there is none.

        A slot may hold more bytes after it.
        """

    @abstractmethod
    def raw_write(self, place: Place, data: bytes) -> None:
        """Replace the content of ``place`` by ``data``."""

    @abstractmethod
    def raw_delete(self, place: Place) -> None:
        """Remove the content of ``place``, or wipe the slot."""


class BlockStoreTests(RawMedium):
    """The tests that every store must pass."""

    block_bytes: ClassVar[int] = 64 << 10
    """Bytes of the largest payload; default: 64 KiB."""
    documents: ClassVar[bool] = True
    """True if the store keeps documents; default: True."""

    @abstractmethod
    def make_store(self) -> BlockStore:
        """Return a store that is not open. All calls in one test return stores on the same medium."""

    def place(self, number: int) -> Place:
        """Return a place of its own for each number from 0 to 63."""
        return f"conformance/{number:02x}/block-{number}" if self.shared else number

    def break_medium(self) -> Callable[[], None] | None:
        """Make writes to the medium fail, and return a function that repairs it; None if it cannot fail."""
        return None

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        """An open store."""
        store = self.make_store()
        store.open()
        yield store
        store.close()

    def test_traits_name_batches_where_the_store_moves_them(self) -> None:
        store = self.make_store()
        overridden = type(store).put is not BlockStore.put or type(store).get is not BlockStore.get
        assert store.traits.batches == overridden, "set `batches` in the traits exactly if put or get is overridden"

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
    def test_a_block_comes_back_as_it_was_put(self, store: BlockStore, share: float) -> None:
        size = max(int(self.block_bytes * share) // store.traits.alignment, 1) * store.traits.alignment
        put = block_to_put(store, self.place(0), size)
        store.put_one(put)
        got = block_to_get(store, self.place(0), size)
        assert store.get_one(got) is Done.DONE
        assert frame_bytes(got) == frame_bytes(put)
        assert not store.traits.variable_size or got.filled == size

    def test_what_lands_on_the_medium_is_the_frame(self, store: BlockStore) -> None:
        put = block_to_put(store, self.place(3), self.block_bytes)
        store.put_one(put)
        on_medium = self.raw_read(self.place(3))
        assert on_medium is not None
        assert on_medium[: store.traits.header_bytes + self.block_bytes] == frame_bytes(put)

    def test_what_others_wrote_is_read_as_it_is(self, store: BlockStore) -> None:
        frame = frame_bytes(block_to_put(store, self.place(1), self.block_bytes))
        self.raw_write(self.place(1), frame)
        got = block_to_get(store, self.place(1), self.block_bytes)
        assert store.get_one(got) is Done.DONE
        assert frame_bytes(got) == frame

    def test_putting_changes_no_other_place(self, store: BlockStore) -> None:
        blocks = [block_to_put(store, self.place(n), self.block_bytes, number=n) for n in range(3)]
        store.put(blocks)
        store.put_one(block_to_put(store, self.place(1), self.block_bytes, number=9))
        for number in (0, 2):
            got = block_to_get(store, self.place(number), self.block_bytes, number=number)
            assert store.get_one(got) is Done.DONE
            assert frame_bytes(got) == frame_bytes(blocks[number])

    def test_a_put_replaces_what_was_there(self, store: BlockStore) -> None:
        store.put_one(block_to_put(store, self.place(0), self.block_bytes, version=1))
        second = block_to_put(store, self.place(0), self.block_bytes, version=2)
        self._remove_if_put_is_conditional(store)
        store.put_one(second)
        got = block_to_get(store, self.place(0), self.block_bytes)
        assert store.get_one(got) is Done.DONE
        assert frame_bytes(got) == frame_bytes(second)

    def _remove_if_put_is_conditional(self, store: BlockStore) -> None:
        """Remove the block, because shared media may refuse to replace it: a name stands for one content."""
        if self.shared:
            self.raw_delete(self.place(0))

    def test_a_place_never_written_is_a_miss_and_no_error(self, store: BlockStore) -> None:
        got = block_to_get(store, self.place(5), self.block_bytes)
        outcome = store.get_one(got)
        assert outcome in {Done.ABSENT, Done.DONE}
        assert not is_verified(store, got, outcome)

    def test_an_absent_name_is_absent(self, store: BlockStore) -> None:
        if not self.shared:
            pytest.skip("slots are always there")
        assert store.get_one(block_to_get(store, self.place(5), self.block_bytes)) is Done.ABSENT

    def test_a_block_taken_away_behind_the_store_is_a_miss(self, store: BlockStore) -> None:
        store.put_one(block_to_put(store, self.place(2), self.block_bytes))
        self.raw_delete(self.place(2))
        got = block_to_get(store, self.place(2), self.block_bytes)
        (outcome,) = store.get([got])
        assert not is_verified(store, got, outcome)

    @pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
    def test_a_truncated_block_is_a_miss(self, store: BlockStore, kept: float) -> None:
        frame = frame_bytes(block_to_put(store, self.place(0), self.block_bytes))
        self.raw_write(self.place(0), frame[: int(len(frame) * kept)])
        got = block_to_get(store, self.place(0), self.block_bytes)
        (outcome,) = store.get([got])
        assert not is_verified(store, got, outcome)

    def test_a_flipped_bit_reaches_the_checksum(self, store: BlockStore) -> None:
        frame = bytearray(frame_bytes(block_to_put(store, self.place(0), self.block_bytes)))
        frame[store.traits.header_bytes + self.block_bytes // 2] ^= 0x10
        self.raw_write(self.place(0), bytes(frame))
        got = block_to_get(store, self.place(0), self.block_bytes)
        (outcome,) = store.get([got])
        assert not is_verified(store, got, outcome)
        assert outcome is not Done.DONE or frame_bytes(got) == bytes(frame)

    def test_outcomes_of_a_batch_are_per_block(self, store: BlockStore) -> None:
        assert (
            store.put([block_to_put(store, self.place(n), self.block_bytes, number=n) for n in range(6)])
            == [Done.DONE] * 6
        )
        self.raw_delete(self.place(1))
        self.raw_write(self.place(4), b"short")
        blocks = [block_to_get(store, self.place(n), self.block_bytes, number=n) for n in (5, 4, 3, 2, 1, 0)]
        outcomes = store.get(blocks)
        verified = [is_verified(store, block, outcome) for block, outcome in zip(blocks, outcomes, strict=True)]
        assert verified == [True, False, True, True, False, True]

    def test_an_empty_batch_is_nothing(self, store: BlockStore) -> None:
        assert store.put([]) == []
        assert store.get([]) == []

    def test_many_threads_may_use_it_at_once(self, store: BlockStore) -> None:
        def round_trip(number: int) -> bool:
            put = block_to_put(store, self.place(number), self.block_bytes, number=number)
            store.put_one(put)
            got = block_to_get(store, self.place(number), self.block_bytes, number=number)
            return is_verified(store, got, store.get_one(got)) and frame_bytes(got) == frame_bytes(put)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(round_trip, range(32)))

    def test_a_reader_sees_a_whole_block_or_none_while_it_is_replaced(self, store: BlockStore) -> None:
        versions = [
            frame_bytes(block_to_put(store, self.place(0), self.block_bytes, version=version)) for version in (1, 2)
        ]
        store.put_one(block_to_put(store, self.place(0), self.block_bytes, version=1))
        stop = threading.Event()

        def read() -> list[str]:
            problems: list[str] = []
            while not stop.is_set():
                got = block_to_get(store, self.place(0), self.block_bytes)
                outcome = store.get_one(got)
                payload = bytes(got.payload)
                if is_verified(store, got, outcome) and payload not in {
                    frame[store.traits.header_bytes :] for frame in versions
                }:
                    problems.append("a block that nobody wrote was accepted")
            return problems

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for version in [2, 1] * 10:
                    store.put_one(block_to_put(store, self.place(0), self.block_bytes, version=version))
            finally:
                stop.set()
            assert [reader.result() for reader in readers] == [[], []]

    def test_a_probe_tells_what_is_there(self, store: BlockStore) -> None:
        if not self.shared:
            pytest.skip("only shared media are probed")
        self.raw_write(self.place(0), frame_bytes(block_to_put(store, self.place(0), self.block_bytes)))
        store.put_one(block_to_put(store, self.place(2), self.block_bytes, number=2))
        assert store.probe([self.place(n) for n in range(4)]).held == (True, False, True, False)
        assert store.probe([]).held == ()

    def test_deleted_blocks_are_gone_and_absent_ones_ignored(self, store: BlockStore) -> None:
        if not self.shared:
            pytest.skip("slots are reused, not deleted")
        store.put([block_to_put(store, self.place(n), self.block_bytes, number=n) for n in range(3)])
        store.delete([self.place(0), self.place(1), self.place(9)])
        assert [self.raw_read(self.place(n)) is not None for n in range(3)] == [False, False, True]

    def test_a_document_that_was_never_written_is_none(self, store: BlockStore) -> None:
        assert store.read_document(DOCUMENT) is None

    def test_documents_are_replaced_and_kept_apart(self, store: BlockStore) -> None:
        if not self.documents:
            pytest.skip("keeps no documents")
        store.write_document(DOCUMENT, b"one")
        store.write_document(DOCUMENT, b"two")
        store.write_document("other", bytes(range(256)))
        assert store.read_document(DOCUMENT) == b"two"
        assert store.read_document("other") == bytes(range(256))

    def test_documents_are_listed_by_the_beginning_of_their_names_or_not_at_all(self, store: BlockStore) -> None:
        store.write_document("a-1", b"one")
        store.write_document("a-2", b"two")
        store.write_document("b-1", b"three")
        assert set(store.list_documents("a-")) in ({"a-1", "a-2"}, set())
        assert list(store.list_documents("c-")) == []

    def test_a_document_that_is_there_is_not_created_again(self, store: BlockStore) -> None:
        if not self.documents:
            pytest.skip("keeps no documents")
        assert store.create_document(DOCUMENT, b"first") == b"first"
        assert store.create_document(DOCUMENT, b"second") == b"first"
        assert store.read_document(DOCUMENT) == b"first"

    def test_a_document_that_is_removed_cannot_be_read_and_can_be_written_again(self, store: BlockStore) -> None:
        if not self.documents:
            pytest.skip("keeps no documents")
        store.remove_document(DOCUMENT)
        store.write_document(DOCUMENT, b"one")
        store.remove_document(DOCUMENT)
        assert not store.read_document(DOCUMENT)
        store.write_document(DOCUMENT, b"two")
        assert store.read_document(DOCUMENT) == b"two"

    def test_documents_survive_the_store(self, store: BlockStore) -> None:
        if not (self.documents and self.persistent):
            pytest.skip("nothing survives on this medium")
        store.write_document(DOCUMENT, b"kept")
        store.close()
        again = self.make_store()
        again.open()
        assert again.read_document(DOCUMENT) == b"kept"
        again.close()

    def test_blocks_survive_the_store(self, store: BlockStore) -> None:
        if not self.persistent:
            pytest.skip("nothing survives on this medium")
        store.put_one(block_to_put(store, self.place(7), self.block_bytes, number=7))
        store.close()
        again = self.make_store()
        again.open()
        got = block_to_get(again, self.place(7), self.block_bytes, number=7)
        assert is_verified(again, got, again.get_one(got))
        again.close()

    def test_a_store_may_be_closed_twice_and_without_being_opened(self, store: BlockStore) -> None:
        store.close()
        store.close()
        self.make_store().close()

    def test_a_store_of_a_medium_of_its_own_may_be_opened_again_after_it_was_closed(self, store: BlockStore) -> None:
        if self.shared:
            pytest.skip("only media of their own are closed and opened again")
        store.close()
        store.open()
        store.put_one(block_to_put(store, self.place(7), self.block_bytes, number=7))
        got = block_to_get(store, self.place(7), self.block_bytes, number=7)
        assert is_verified(store, got, store.get_one(got))

    def test_a_medium_that_fails_gives_typed_errors_and_the_store_works_again_after_it(self, store: BlockStore) -> None:
        repair = self.break_medium()
        if repair is None:
            pytest.skip("this medium cannot fail")
        try:
            (outcome,) = store.put([block_to_put(store, self.place(0), self.block_bytes)])
            assert isinstance(outcome, (TemporaryStoreError, PermanentStoreError))
            with pytest.raises(StoreError):
                store.put_one(block_to_put(store, self.place(1), self.block_bytes))
        finally:
            repair()
        assert store.put([block_to_put(store, self.place(0), self.block_bytes)]) == [Done.DONE]
