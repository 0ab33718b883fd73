"""The parts of ``torch.cuda`` that copies use, and the calls of the CUDA runtime that register memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("kv_tiering.copy")

ALREADY_REGISTERED = 712
"""The runtime's error number cudaErrorHostMemoryAlreadyRegistered."""
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
UNREADABLE = -1
"""Stands for an error number that the binding cannot express."""


Event = torch.cuda.Event
"""Class of events on a stream."""
Stream = torch.cuda.Stream
"""Class of streams."""
TORCH_CUDA: Any = torch.cuda
"""The module that a stand-in replaces in tests."""


def device_properties(device: torch.device) -> Any:
    """Return the properties of a GPU."""
    return torch.cuda.get_device_properties(device)


def driver_function(name: str, load: Callable[[str], Any] = ctypes.CDLL) -> Any:
    """Return a function of CUDA's driver; None if the driver lacks it, or is another one (ROCm, none).

    Args:
        name: name of the function.
        load: loads a shared library by name.
    """
    if torch.version.hip is not None:
        return None
    try:
        return getattr(load("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        logger.debug("copies go without %s: %s", name, error)
        return None


def maps_registered_memory(device: torch.device, load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Return True if kernels on ``device`` may use registered host memory by its addresses on the host.

    Args:
        device: a GPU whose context exists.
        load: loads a shared library by name.
    """
    ask, found = driver_function("cuDeviceGetAttribute", load), ctypes.c_int(0)
    if ask is None or ask(ctypes.byref(found), _CAN_USE_HOST_POINTER, ctypes.c_int(device.index or 0)):
        return False
    return bool(found.value)


def find_relaxation(load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], None] | None:
    """Return a function that lets its thread register memory while another thread captures a graph.

    Without its call, a registration fails in the course of a capture, and the capture too. None: the driver has no such
    function.

    Args:
        load: loads a shared library by name.
    """
    exchange = driver_function("cuThreadExchangeStreamCaptureMode", load)
    if exchange is None:
        return None

    def relax() -> None:
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    return relax


class HostRegistration:
    """The runtime's calls that register host memory, on one device.

    CUDA reports the error of a failed call again at the thread's next kernel launch, which would be the engine's. Every
    method therefore takes the pending error after a failed call.

    Args:
        api: ``torch.cuda`` or a stand-in.
        device: the GPU whose context is used; without it, CUDA would create a context on its first device.
    """

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        """Register host memory for copies without the driver's own buffers; return the error number, or 0."""
        return self._call("cudaHostRegister", address, nbytes, 0)

    def unregister(self, address: int) -> int:
        """Undo :meth:`register`; return the error number, or 0."""
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        with self._api.device(self._device):
            code = _status(getattr(self._api.cudart(), name), *arguments)
            if code:
                self._take_error()
        return code

    def _take_error(self) -> None:
        """Launch a kernel, which takes the pending error in the place of the engine's next kernel."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.debug("took a pending error from CUDA: %s", error)


def _status(call: Callable[..., Any], *arguments: int) -> int:
    """Return the error number of a runtime call, or :data:`UNREADABLE`.

    An enum of Python raises for numbers that it has no name for.
    """
    try:
        answer = call(*arguments)
        return int(getattr(answer, "value", answer))
    except (TypeError, ValueError):
        return UNREADABLE
