"""The call of the driver's batched copy, with a fake driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiering.copy.batch import BatchCopy, BatchCopyError, find_batch_copy


class Driver:
    """A driver that records the arguments of each call, read as C reads them."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[dict[str, Any]] = []

    def __call__(self, dsts: Any, srcs: Any, sizes: Any, count: Any, attrs: Any, idxs: Any, *rest: Any) -> int:
        def read(array: Any) -> list[int]:
            return list((ctypes.c_uint64 * count.value).from_address(array.value))

        raw = bytes(attrs._obj)
        self.calls.append(
            {
                "copies": list(zip(read(dsts), read(srcs), read(sizes), strict=True)),
                "attributes": [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)],
                "first": idxs._obj.value,
                "num_attrs": rest[0].value,
                "has_index": len(rest) == 3,
                "stream": rest[-1].value,
            }
        )
        return self.code


def numbers(*values: int) -> Any:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("reports_index", [False, True])
def test_the_arguments_are_those_of_the_drivers_documentation(reports_index: bool) -> None:
    driver = Driver()
    copy = BatchCopy(driver, reports_index)
    copy(numbers(1, 2), numbers(3, 1 << 40), numbers(5, 6), 77, in_stream_order=True)
    assert driver.calls == [
        {
            "copies": [(1, 3, 5), (2, 1 << 40, 6)],
            "attributes": [1, 0, 0, 0, 0, 0],  # order, a hint of two words for each side, flags
            "first": 0,
            "num_attrs": 1,
            "has_index": reports_index,
            "stream": 77,
        }
    ]
    copy(numbers(1), numbers(2), numbers(3), 77, in_stream_order=False)
    assert driver.calls[1]["attributes"][0] == 3


def test_no_copies_are_no_call() -> None:
    driver = Driver()
    BatchCopy(driver, False)(numbers(), numbers(), numbers(), 77, in_stream_order=True)
    assert driver.calls == []


def test_a_refusal_names_the_error() -> None:
    with pytest.raises(BatchCopyError, match="1 copies with CUDA error 801"):
        BatchCopy(Driver(801), False)(numbers(1), numbers(2), numbers(3), 77, in_stream_order=True)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"], False),  # CUDA 13 exports both
        (["cuMemcpyBatchAsync"], True),
        ([], None),
    ],
)
def test_the_form_of_the_call_is_that_of_the_drivers_version(names: list[str], found: bool | None) -> None:
    functions = {name: Driver() for name in names}
    asked = []

    def load(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(**functions)

    copy = find_batch_copy(load)
    assert set(asked) == {"libcuda.so.1"}
    if found is None:
        assert copy is None
        return
    assert copy is not None
    copy(numbers(1), numbers(2), numbers(3), 77, in_stream_order=True)
    (call,) = functions[names[-1]].calls
    assert call["has_index"] is found


def test_a_machine_without_a_driver_has_no_batched_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert find_batch_copy(load) is None
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert find_batch_copy(lambda name: SimpleNamespace(cuMemcpyBatchAsync=Driver())) is None
