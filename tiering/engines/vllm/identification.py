"""The identification of a model's weights while the engine starts, with proof that it read these.

vLLM reads the weights before it builds its connectors. What the file system records of the files is therefore noted
earlier, when vLLM looks the connector's class up for its configuration, and compared after the files were identified.
Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.built import UNKNOWN, settings_mark
from tiering.engines.vllm.callers import variables_of
from tiering.engines.vllm.weights import Seen, draft_identity, files_seen, unproven, weights_identity
from tiering.errors import ConfigError, PermanentStoreError, TemporaryStoreError
from tiering.runtime.pool import ThreadPool

logger = logging.getLogger("kv_tiering.vllm")

WAIT_SECONDS = 1.0
"""Longest time that a tier's I/O side waits for the identity in one attempt to open, in seconds."""

_SEEN = "kv_tiering_files_seen"
"""Attribute of vLLM's model configuration, with which it reaches the engine's process."""
_CLOCK_SECONDS = 2.0
"""Error of a process's start time, which the system records in whole seconds since its own start."""
_DEPTH = 8
"""Number of callers whose local variables are examined."""


def note_files(caller: FrameType | None) -> None:
    """Note what the file system records of the model's files, in the configuration that ``caller`` builds.

    Only the first call for a configuration counts, because vLLM reads the weights later. The files of an engine without
    a connector are left alone.

    Args:
        caller: the stack frame that looks up the connector's class.
    """
    for config in _configurations(caller):
        model_config = config.model_config
        if config.kv_transfer_config is not None and not hasattr(model_config, _SEEN):
            try:
                seen: Seen | None = files_seen(model_config, config.load_config)
            except (ConfigError, OSError):
                seen = None  # the identification finds and reports the same problem
            object.__setattr__(model_config, _SEEN, seen)
        return


def _configurations(frame: FrameType | None) -> Iterator[Any]:
    """Yield vLLM's configurations among the callers' local variables, the innermost first."""
    for variables in variables_of(frame, _DEPTH):
        for value in list(variables.values()):
            own = _own_attributes(value)
            if "load_config" in own and isinstance(_own_attributes(own.get("model_config")).get("model"), str):
                yield value


def _own_attributes(value: object) -> Mapping[str, Any]:
    """Return the attributes that an object has itself.

    Any object may be among a caller's variables. Some of vLLM's, such as a worker's wrapper that is not built yet, call
    themselves without an end for an attribute that they lack.
    """
    try:
        own: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own


def _older(files: Seen) -> Seen:
    """Return those of ``files`` that last changed before this process, and thus the engine, started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    started = int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return {name: seen for name, seen in files.items() if seen[4] < (started - _CLOCK_SECONDS) * 1e9}


class Identification:
    """The identity of a model with the content of its weights, determined by a thread.

    Tiers that outlive the process call the object on their I/O side when they open. They join the engine once the
    weights are identified, and never if the engine may have read other content.

    Args:
        model: identity of the model without its weights, from the scheduler's configuration.
        vllm_config: vLLM's configuration.
        marks: the different marks of the workers (:mod:`tiering.engines.vllm.built`).
    """

    def __init__(self, model: ModelIdentity, vllm_config: Any, marks: Sequence[bytes]) -> None:
        self._model = model
        self._config = vllm_config
        self._marks = marks
        self._ended = threading.Event()
        self._error: str | None = None
        self._threads = ThreadPool("kv-tiering-identity", 1)

    def start(self) -> None:
        """Begin the identification.

        Raises:
            ConfigError: the model cannot be identified, for a reason that is known without reading its weights.
        """
        before: Seen | None = getattr(self._config.model_config, _SEEN, None)
        files_seen(self._config.model_config, self._config.load_config)
        if len(self._marks) > 1:
            self._fail("the workers' models were built from different configurations")
        elif UNKNOWN in self._marks or not self._marks:
            self._fail("the configuration that the workers' models were built from is not known")
        else:
            self._threads.run(lambda: self._identify(before), lambda error: self._fail(str(error)))

    def stop(self) -> None:
        """Wait for no identity any more."""
        self._threads.stop()
        self._ended.set()

    def __call__(self) -> ModelIdentity:
        """Return the identity of the model, weights included. Blocks for :data:`WAIT_SECONDS` at most.

        Raises:
            TemporaryStoreError: the weights are not identified yet.
            PermanentStoreError: blocks of this model must not outlive the process.
        """
        if not self._ended.wait(WAIT_SECONDS):
            raise TemporaryStoreError("the model's weights are still being identified")
        if self._error is not None:
            raise PermanentStoreError(self._error)
        return self._model

    def _identify(self, before: Seen | None) -> None:
        model_config, load_config = self._config.model_config, self._config.load_config
        try:
            weights = weights_identity(model_config, load_config)
            draft = draft_identity(self._config)
            after = files_seen(model_config, load_config)
            changed = unproven(_older(after) if before is None else before, after)
        except Exception as error:  # also a lack of threads, and what foreign objects raise
            self._fail(f"the model's weights cannot be identified: {error}")
            return
        if changed is not None:
            self._fail(
                f"{changed} changed while the engine started, so what the engine computes with is not known; "
                "restart the engine when the model's files are complete"
            )
            return
        known = self._model.overrides if draft is None else {**self._model.overrides, "draft": draft}
        if (mark := self._marks[0]) != settings_mark(self._model):
            known = {**known, "computed": mark.hex()}
        self._model = dataclasses.replace(self._model, weights=weights, overrides=known)
        self._ended.set()

    def _fail(self, reason: str) -> None:
        self._error = f"{reason}; no tier that outlives the process is used"
        logger.warning("%s", self._error)
        self._ended.set()
