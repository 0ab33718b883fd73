"""vLLM's interface of secondary tiers, and the differences between its versions.

| vLLM | change |
| --- | --- |
| 0.28 | a tier may be named by ``module_path``; before, by its plugin only |
| 0.29 | events have ``ownership`` |
| 0.30 | the rows of a job are ``chunk_ids``, before ``block_ids`` |
| 0.31 | results have ``transfer_bytes``, and a tier has a ``backpressure_detector`` |
| 0.32 | a tier has a ``cache_hit_source`` |
| 0.33 | calls come from more than one thread, one at a time |

Nothing here imports vLLM; its classes and objects are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np

from tiering.api.manager import OffloadingEvent
from tiering.api.request import ReqContext
from tiering.engines.vllm.callers import variables_of
from tiering.secondary.contract import TransferJob


def context_of(req_context: Any) -> ReqContext:
    """Return the context of one of vLLM's requests."""
    params = getattr(req_context, "kv_transfer_params", None)
    return ReqContext(str(req_context.req_id), params if isinstance(params, Mapping) else None)


def job_of(job: Any) -> TransferJob:
    """Return one of vLLM's jobs as a job of this project, with a copy of its keys and rows."""
    rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    keys = tuple(map(bytes, job.keys))
    return TransferJob(
        int(job.job_id), keys, np.array(rows, np.int64), bool(job.is_promotion), context_of(job.req_context)
    )


def made(kind: type, **fields: Any) -> Any:
    """Return an instance of one of vLLM's dataclasses with those of ``fields`` that this version has."""
    known = {each.name for each in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})


def event_for(kind: type, media: Any, localities: Any, event: OffloadingEvent) -> Any:
    """Return an event for vLLM.

    Args:
        kind: vLLM's class of events.
        media: vLLM's enumeration of media.
        localities: vLLM's enumeration of localities.
        event: an event of a secondary tier.
    """
    return made(
        kind,
        keys=event.keys,
        medium=media(event.medium),
        removed=event.removed,
        locality=localities(event.locality),
        ownership=event.tier,
    )


def configurations(spec: Any, caller: FrameType | None) -> tuple[Any, Any]:
    """Return vLLM's configuration and that of its KV cache; None for what is not found.

    The spec of a tier has a summary only. Both are arguments of the connector that builds the tier, which is among the
    callers.

    Args:
        spec: vLLM's spec, whose attributes come first.
        caller: the stack frame that builds the tier.
    """
    names = ("vllm_config", "kv_cache_config")
    found = {name: value for name in names if (value := getattr(spec, name, None)) is not None}
    for variables in variables_of(caller):
        for name in names:
            if (value := variables.get(name)) is not None:
                found.setdefault(name, value)
    return found.get("vllm_config"), found.get("kv_cache_config")


def groups_of(config: Any) -> int:
    """Return a number above the index of every KV-cache group in the keys of blocks."""
    return max([len(config.groups), *(int(getattr(group, "group_id", 0)) + 1 for group in config.groups)])


def facts(config: Any, row_bytes: int) -> Sequence[str]:
    """Return what the content of a row depends on, as texts for the namespace.

    Args:
        config: vLLM's summary of the configuration (``OffloadingConfig``).
        row_bytes: size of a row.
    """
    words = ("worker_kv_bytes_per_block", "replicated_layout", "canonical_layout", "kv_cache_layout")
    parallel = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return [
        f"row {row_bytes}",
        *(f"{word} {getattr(config, word, None)}" for word in words),
        *(f"{word} {getattr(config.parallel, word, None)}" for word in parallel),
        *(f"{word} {getattr(config.cache, word, None)}" for word in ("tokens_per_hash", "blocks_per_chunk")),
        *(f"{group.tokens_per_block} tokens {','.join(group.layer_names)}" for group in config.groups),
    ]
