"""The path of a block between a row and a medium: bytes on the medium, and refusals on the way back."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.medium.io_fakes import LOAD, NAMESPACE, PAGE, STORE, Primary, make_job, outcome_names
from tiering.errors import ConfigError, PermanentStoreError
from tiering.medium.block_store import BlockIO, BlockStore, Done
from tiering.medium.frame import Codec, CorruptReason, FrameError, FrameHeader, SequenceSource, parse_header
from tiering.medium.layers.breaker import Breakers
from tiering.medium.pipeline import Pipeline
from tiering.secondary.options import BreakerOptions
from tiering.testing.chaos import ChaosLayer, Fault
from tiering.testing.clock import FakeClock
from tiering.testing.faults import DictStore
from tiering.testing.keys import key_of


def pipeline_of(
    store: BlockStore,
    primary: Primary,
    *,
    clock: FakeClock | None = None,
    compress: bool = False,
    element_size: int = 2,
    sequence: SequenceSource | None = None,
) -> Pipeline:
    clock = FakeClock() if clock is None else clock
    return Pipeline(
        store,
        primary.rows.data,
        name="t",
        breakers=Breakers.build(BreakerOptions(), name="t", clock=clock),
        clock=clock,
        compress=compress,
        element_size=element_size,
        sequence=SequenceSource() if sequence is None else sequence,
    )


def store_all(pipeline: Pipeline, primary: Primary, count: int) -> None:
    job = make_job(primary, STORE, range(count))
    assert pipeline.run(job, range(count)) == [Done.DONE] * count


def load_refusals(
    pipeline: Pipeline, primary: Primary, count: int, fingerprint: bytes = NAMESPACE.fingerprint
) -> list[object]:
    """Return for each block the reason of its refusal, or its other outcome."""
    job = make_job(primary, LOAD, range(count), fingerprint=fingerprint)
    return [
        outcome.reason if isinstance(outcome, FrameError) else outcome for outcome in pipeline.run(job, range(count))
    ]


@pytest.mark.parametrize(
    "medium", [DictStore(), DictStore(variable_size=True), DictStore(header_bytes=PAGE, alignment=PAGE)]
)
@pytest.mark.parametrize("size", [1, 100, PAGE, PAGE + 1, 3 * PAGE])
def test_blocks_come_back_as_they_were(medium: DictStore, size: int) -> None:
    primary = Primary(8, size)
    pipeline = pipeline_of(medium, primary)
    blocks = [primary.block(row) for row in range(4)]
    store_all(pipeline, primary, 4)
    job = make_job(primary, LOAD, range(4), rows=range(4, 8))
    assert pipeline.run(job, [3, 1, 2, 0]) == [Done.DONE] * 4
    assert [primary.block(row) for row in range(4, 8)] == blocks


def test_a_frame_on_the_medium_says_what_it_is() -> None:
    primary, store = Primary(3), DictStore(header_bytes=PAGE, alignment=PAGE)
    store_all(pipeline_of(store, primary, sequence=SequenceSource(500)), primary, 3)
    frame = store.frames[2]
    header = parse_header(memoryview(frame))
    assert isinstance(header, FrameHeader)
    assert (header.key, header.fingerprint, header.sequence) == (key_of(2), NAMESPACE.fingerprint, 502)
    assert not any(frame[128:PAGE])
    assert bytes(frame[PAGE:]) == primary.block(2)


def test_only_the_positions_asked_for_are_moved() -> None:
    primary, store = Primary(4), DictStore()
    pipeline_of(store, primary).run(make_job(primary, STORE, range(4), places=[40, 41, 42, 43]), [1, 3])
    assert sorted(store.frames) == [41, 43]


def test_the_padding_of_a_row_never_gets_onto_the_medium() -> None:
    primary, store = Primary(1, PAGE + 100), DictStore(header_bytes=PAGE, alignment=PAGE)
    store_all(pipeline_of(store, primary), primary, 1)
    frame = store.frames[0]
    assert bytes(frame[PAGE : PAGE + primary.size]) == primary.block(0)
    assert len(frame) == 3 * PAGE
    assert not any(frame[PAGE + primary.size :])


def test_what_was_read_into_a_header_buffer_is_not_written_again() -> None:
    primary, store = Primary(1), DictStore(header_bytes=PAGE, alignment=PAGE)
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 1)
    store.frames[0][128:PAGE] = b"\xff" * (PAGE - 128)
    load_refusals(pipeline, primary, 1)
    store_all(pipeline, primary, 1)
    assert not any(store.frames[0][128:PAGE])


def test_absent_blocks_are_absent() -> None:
    primary = Primary(2)
    assert load_refusals(pipeline_of(DictStore(), primary), primary, 2) == [Done.ABSENT, Done.ABSENT]


@given(data=st.data(), variable=st.booleans(), compress=st.booleans())
def test_whatever_bit_is_flipped_no_wrong_block_is_handed_out(
    data: st.DataObject, variable: bool, compress: bool
) -> None:
    store = DictStore(variable_size=variable)
    primary = Primary(2, 300)
    primary.rows[1] //= 64
    pipeline = pipeline_of(store, primary, compress=variable and compress, element_size=1)
    store_all(pipeline, primary, 2)
    blocks = [primary.block(0), primary.block(1)]
    frame = store.frames[1]
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    primary.rows[:] = 0
    first, second = load_refusals(pipeline, primary, 2)
    assert first is Done.DONE
    assert primary.block(0) == blocks[0]
    if not isinstance(second, CorruptReason):
        # Some bits of a zstd frame have no meaning; then the block is right all the same.
        assert variable
        assert compress
        assert primary.block(1) == blocks[1]


@given(keep=st.integers(0, 427), variable=st.booleans())
def test_a_truncated_frame_is_never_handed_out(keep: int, variable: bool) -> None:
    store = DictStore(variable_size=variable)
    primary = Primary(1, 300)
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 1)
    del store.frames[0][keep:]
    if keep < 128:
        store.frames[0] += bytes(128 - keep)
    if not variable:
        store.frames[0] += bytes(428 - len(store.frames[0]))
    (refusal,) = load_refusals(pipeline, primary, 1)
    assert isinstance(refusal, CorruptReason)


def test_another_blocks_frame_is_refused() -> None:
    primary, store = Primary(2), DictStore()
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 2)
    store.frames[0], store.frames[1] = store.frames[1], store.frames[0]
    assert load_refusals(pipeline, primary, 2) == [CorruptReason.KEY, CorruptReason.KEY]


def test_another_blocks_payload_under_the_right_header_is_refused() -> None:
    primary, store = Primary(2), DictStore()
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 2)
    store.frames[0][128:] = store.frames[1][128:]
    assert load_refusals(pipeline, primary, 2) == [CorruptReason.PAYLOAD, Done.DONE]


def test_another_namespaces_frame_is_refused() -> None:
    primary, store = Primary(1), DictStore()
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 1)
    assert load_refusals(pipeline, primary, 1, NAMESPACE.next_epoch().fingerprint) == [CorruptReason.NAMESPACE]


def test_a_store_that_reads_nothing_and_says_done_is_found_out() -> None:
    class _Liar(DictStore):
        def get_one(self, block: BlockIO) -> Done:
            return Done.DONE

    primary, store = Primary(1), _Liar()
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 1)
    assert load_refusals(pipeline, primary, 1) == [CorruptReason.MAGIC]


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.TRUNCATE, Fault.SWAP])
@pytest.mark.parametrize("when", ["puts", "gets"])
@pytest.mark.parametrize("seed", range(4))
def test_silent_faults_of_a_medium_are_refused(fault: Fault, when: str, seed: int) -> None:
    primary, store = Primary(3), ChaosLayer(DictStore(), seed=seed)
    pipeline = pipeline_of(store, primary)
    store_all(pipeline, primary, 3)
    store.inject(fault, **{when: 1})
    store_all(pipeline, primary, 1)
    outcomes = load_refusals(pipeline, primary, 3)
    assert any(isinstance(outcome, CorruptReason) for outcome in outcomes)


def test_refused_blocks_are_logged_once_and_not_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    clock, primary, store = FakeClock(), Primary(4), DictStore()
    pipeline = pipeline_of(store, primary, clock=clock)
    store_all(pipeline, primary, 4)
    for frame in store.frames.values():
        frame[200] ^= 1
    with caplog.at_level(logging.WARNING, "kv_tiering.io"):
        for _ in range(10):
            load_refusals(pipeline, primary, 4)
        clock.advance(60)
        load_refusals(pipeline, primary, 4)
    assert [record.getMessage().split()[2] for record in caplog.records] == ["4", "40"]


def test_compressible_blocks_are_stored_smaller_and_come_back() -> None:
    primary, store = Primary(4, 1 << 16), DictStore(variable_size=True)
    numbers = np.random.default_rng(0).normal(size=(3, 1 << 15)).astype(np.float32)
    primary.rows[:3] = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = [primary.block(row) for row in range(4)]
    store_all(pipeline_of(store, primary, compress=True), primary, 4)
    headers = [parse_header(memoryview(store.frames[place])) for place in range(4)]
    assert [header.codec for header in headers if isinstance(header, FrameHeader)] == [Codec.ZSTD_SPLIT16] * 3 + [
        Codec.RAW
    ]
    assert len(store.frames[0]) < 0.8 * primary.size
    primary.rows[:] = 0
    reader = pipeline_of(store, primary, compress=False)
    assert load_refusals(reader, primary, 4) == [Done.DONE] * 4
    assert [primary.block(row) for row in range(4)] == blocks


def test_compression_of_more_than_the_scratch_memory_goes_in_batches() -> None:
    primary, store = Primary(5, 3 << 20), DictStore(variable_size=True)
    primary.rows[:] //= 16
    blocks = [primary.block(row) for row in range(5)]
    store_all(pipeline_of(store, primary, compress=True), primary, 5)
    assert [len(places) for _, places in store.calls] == [2, 2, 1]
    primary.rows[:] = 0
    assert load_refusals(pipeline_of(store, primary), primary, 5) == [Done.DONE] * 5
    assert [primary.block(row) for row in range(5)] == blocks


def test_compression_is_refused_for_blocks_of_a_fixed_size() -> None:
    with pytest.raises(ConfigError, match="fixed size"):
        pipeline_of(DictStore(), Primary(1), compress=True)


@pytest.mark.parametrize(
    "view", [memoryview(bytes(16)), memoryview(bytes(16)).cast("B", (4, 4)), memoryview(bytearray(16))]
)
def test_a_view_that_is_no_primary_buffer_is_refused(view: memoryview) -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="primary view"):
        Pipeline(
            DictStore(),
            view,
            name="t",
            breakers=Breakers.build(BreakerOptions(), name="t", clock=clock),
            clock=clock,
        )


@pytest.mark.parametrize("rows", [[-1], [2], [1 << 40]])
def test_rows_outside_the_primary_buffer_are_refused(rows: list[int]) -> None:
    primary = Primary(2)
    with pytest.raises(PermanentStoreError, match="outside"):
        pipeline_of(DictStore(), primary).run(make_job(primary, LOAD, [0], rows=rows), [0])


def test_a_buffer_less_aligned_than_the_medium_asks_for_is_refused() -> None:
    primary = Primary(2, PAGE)
    with pytest.raises(PermanentStoreError, match="not aligned"):
        pipeline_of(DictStore(header_bytes=4 * PAGE, alignment=4 * PAGE), primary).run(
            make_job(primary, STORE, [0]), [0]
        )


def test_an_overdue_job_is_not_framed_and_not_attempted() -> None:
    clock, primary, store = FakeClock(), Primary(2), DictStore()
    pipeline = pipeline_of(store, primary, clock=clock)
    outcomes = pipeline.run(make_job(primary, STORE, range(2), deadline=clock()), range(2))
    assert outcome_names(outcomes) == ["OverdueError"] * 2
    assert store.calls == []


def test_an_outcome_keeps_no_view_of_the_primary_buffer_alive() -> None:
    primary, store = Primary(1), ChaosLayer(DictStore())
    pipeline = pipeline_of(store, primary)
    store.inject(Fault.PERMANENT, puts=1)
    outcomes = pipeline.run(make_job(primary, STORE, [0]), [0])
    gone = weakref.ref(primary.rows.base)
    pipeline.release()
    del primary, pipeline, store
    gc.collect()
    assert gone() is None
    assert outcome_names(outcomes) == ["PermanentStoreError"]
