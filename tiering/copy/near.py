"""The CPUs near a GPU, and the share of the rows that a rank prepares near them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tiering.api.engine import CanonicalKVCaches
from tiering.copy.layout import RowLayout
from tiering.primary.memory.prefault import Share

logger = logging.getLogger("kv_tiering.copy")

_PCI_NUMBERS = ("pci_domain_id", "pci_bus_id", "pci_device_id")


def share_of(kv_caches: CanonicalKVCaches, layout: RowLayout) -> Share:
    """Return the part of the rows that the rank of ``layout`` prepares, near the GPU of its KV cache."""
    device = kv_caches.tensors[0].tensor.device
    properties = None
    if device.type == "cuda":
        from tiering.copy.cudart import device_properties

        properties = device_properties(device)
    return Share(layout.row_stride, *layout.part, *layout.turn, cpus_near(properties))


def cpus_near(properties: Any, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the CPUs of the memory node that a GPU is connected to; empty if they are not known.

    Args:
        properties: the GPU's properties from ``torch.cuda.get_device_properties``; None for no GPU.
        sysfs: mount point of sysfs.
    """
    domain, bus, number = (getattr(properties, name, None) for name in _PCI_NUMBERS)
    if domain is None or bus is None or number is None:
        return frozenset()
    device = sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0"
    try:
        node = int((device / "numa_node").read_text())
        if node < 0:  # a machine with one node does not number it
            return frozenset()
        return _cpus((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as error:
        logger.debug("the memory node of %s is not known: %s", device.name, error)
        return frozenset()


def _cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``"0-3,8"``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
