"""The CPUs near a GPU, from a faked sysfs, and a rank's share of the rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.copy import kv
from tiering.copy.layout import RowLayout
from tiering.copy.near import cpus_near, share_of

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


def machine(sysfs: Path, node: str, cpulist: str) -> Path:
    device = sysfs / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    memory = sysfs / "devices/system/node/node1"
    memory.mkdir(parents=True)
    (memory / "cpulist").write_text(cpulist)
    return sysfs


def test_the_cpus_are_those_of_the_memory_node_of_the_gpu(tmp_path: Path) -> None:
    assert cpus_near(GPU, machine(tmp_path, "1\n", "2-4,9\n")) == {2, 3, 4, 9}


@pytest.mark.parametrize(("node", "cpulist"), [("-1\n", "0-3\n"), ("1\n", "\n"), ("7\n", "0-3\n"), ("?", "0-3")])
def test_a_system_that_does_not_tell_is_no_error(tmp_path: Path, node: str, cpulist: str) -> None:
    assert cpus_near(GPU, machine(tmp_path, node, cpulist)) == frozenset()


def test_a_torch_that_does_not_tell_the_address_is_no_error(tmp_path: Path) -> None:
    assert cpus_near(SimpleNamespace(pci_bus_id=1), tmp_path) == cpus_near(None, tmp_path) == frozenset()


def test_a_rank_prepares_its_part_of_each_row() -> None:
    cache = kv.two_groups()
    share = share_of(cache, RowLayout.of(cache, 2, 1, 2))
    assert (share.start, share.stop, share.turns) == (
        80,
        320,
        1,
    )  # from the begin of the smaller group's part to the end of the larger group's
    assert share.row_stride == 4096


def test_ranks_that_hold_the_same_kv_begin_at_different_places() -> None:
    cache = kv.canonical()
    shares = [share_of(cache, RowLayout.of(cache, 1, rank, 2, copies=2)) for rank in range(2)]
    assert [(share.turn, share.turns) for share in shares] == [(0, 2), (1, 2)]
    assert shares[0].start == shares[1].start == 0
