"""The configuration that a worker's model was built from.

vLLM's models change their configuration while they are built: in a worker that is a process of its own the scheduler's
copy stays as it was, and a language model that is part of another model is built from a changed copy. Each worker
therefore leaves a mark in the shared rows: a digest of its settings and of all such changes. A mark that differs from
the scheduler's own becomes part of the namespace. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.callers import variables_of
from tiering.engines.vllm.weights import meaning, plain
from tiering.primary.memory.region import MARK_BYTES

logger = logging.getLogger("kv_tiering.vllm")

UNKNOWN = b"\xff" * MARK_BYTES
"""Mark of a worker whose model cannot be examined."""
_DERIVED = frozenset({"architectures", "tie_word_embeddings"})
"""Words that vLLM sets in copies of parts of a configuration; KV does not depend on them."""


def settings_mark(model: ModelIdentity, changes: Iterable[str] = ()) -> bytes:
    """Return the mark of a side.

    Args:
        model: identity of the model from the side's own configuration.
        changes: configurations that parts of the model were built from, and that are no part of the side's own.
    """
    content = json.dumps([model.dtype, dict(model.overrides), *sorted(changes)], sort_keys=True)
    return hashlib.sha256(content.encode()).digest()[:MARK_BYTES]


def worker_mark(model: ModelIdentity, hf_config: Any, caller: FrameType | None) -> bytes:
    """Return the mark of a worker; :data:`UNKNOWN` if its model cannot be examined.

    Args:
        model: identity of the model from the worker's configuration.
        hf_config: the model's configuration in the worker.
        caller: the stack frame that builds the worker's connector.
    """
    try:
        built = model_of(caller)
        if built is not None:
            return settings_mark(model, changed_configs(built, hf_config))
        logger.warning("the worker's model is not found, so the configuration that it was built from is not known")
    except Exception:  # models are foreign code
        logger.warning("the configuration that the worker's model was built from is not known", exc_info=True)
    return UNKNOWN


def model_of(frame: FrameType | None) -> Any:
    """Return the model of the worker among the callers; None: there is none.

    vLLM gives a connector no other access to the model.
    """
    for variables in variables_of(frame):
        get_model = getattr(variables.get("self"), "get_model", None)
        if callable(get_model):
            return get_model()
    return None


def changed_configs(built: Any, hf_config: Any) -> set[str]:
    """Return the configurations in a model's modules that differ from all parts of ``hf_config``, as JSON.

    Args:
        built: the model.
        hf_config: its configuration.
    """
    known = {_text(part) for part in _parts(hf_config.to_dict())}
    configs = {id(config): config for module in built.modules() for config in _configs_of(module)}
    return {_text(config.to_dict()) for config in configs.values()} - known


def _configs_of(module: Any) -> Iterator[Any]:
    """Yield a module's own configurations, those in vLLM's configuration included."""
    for value in vars(module).values():
        for config in (value, getattr(getattr(value, "model_config", None), "hf_config", None)):
            if isinstance(getattr(config, "model_type", None), str) and callable(getattr(config, "to_dict", None)):
                yield config


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and all configurations in it."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _parts(item)


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(_without_derived(meaning(plain(config))), sort_keys=True)


def _without_derived(value: Any) -> Any:
    if isinstance(value, dict):
        return {word: _without_derived(item) for word, item in value.items() if word not in _DERIVED}
    return [_without_derived(item) for item in value] if isinstance(value, list) else value
