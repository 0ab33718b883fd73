"""The KV-cache configurations of all pipeline stages.

vLLM gives each worker the configuration of its own stage, and the scheduler that of the first one. The workers exchange
theirs while vLLM builds their connectors, which it does in all of them together. The scheduler's connector is built
after them, and takes the configurations from the workers through vLLM's executor. No configuration is exchanged if
there is one stage.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed import all_gather_object

from tiering.engines.vllm.callers import variables_of
from tiering.errors import ConfigError


def stages_of_worker(kv_cache_config: Any, parallel: Any, group_of_stages: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the configuration of each stage. All workers must call this function together.

    Args:
        kv_cache_config: the configuration of this worker's stage.
        parallel: vLLM's configuration of parallelism.
        group_of_stages: vLLM's function that returns the group of this worker and those of the other stages.

    Raises:
        ConfigError: the workers are not numbered stage by stage, or a stage has no layers with KV.
    """
    stages = int(parallel.pipeline_parallel_size)
    if stages == 1:
        return (kv_cache_config,)
    group = group_of_stages()
    found: list[Any] = [None] * group.world_size
    all_gather_object(found, (int(parallel.rank), kv_cache_config), group=group.cpu_group)
    ranks, configs = zip(*found, strict=True)
    if [rank * stages // int(parallel.world_size) for rank in ranks] != list(range(stages)):
        raise ConfigError(
            f"pipeline parallelism: the ranks {ranks} of {parallel.world_size} are one worker of each of {stages} "
            "stages, so they are not numbered stage by stage; use tensor parallelism"
        )
    return _checked(configs)


def stages_of_engine(
    kv_cache_config: Any, parallel: Any, caller: FrameType | None, of_worker: Callable[..., Any], engine_id: str
) -> tuple[Any, ...]:
    """Return the configuration of each stage, as the workers have exchanged them.

    Args:
        kv_cache_config: the configuration of the first stage.
        parallel: vLLM's configuration of parallelism.
        caller: the stack frame that builds the scheduler's connector.
        of_worker: function of a module that returns the configurations in a worker, from the worker and ``engine_id``.
        engine_id: id of the engine.

    Raises:
        ConfigError: vLLM's executor is not found, or the workers do not agree.
    """
    if int(parallel.pipeline_parallel_size) == 1:
        return (kv_cache_config,)
    core = core_of(caller)
    if core is None:
        raise ConfigError(
            "pipeline parallelism: vLLM's executor is not found among the callers, so the layers of the later stages "
            "are not known; use tensor parallelism"
        )
    first, *others = core.model_executor.collective_rpc(of_worker, args=(engine_id,))
    if any(other != first for other in others):
        raise ConfigError("the workers report different KV-cache configurations of the pipeline stages")
    return tuple(first)


def core_of(frame: FrameType | None) -> Any:
    """Return vLLM's engine core, which has the executor, among the callers; None: there is none.

    vLLM gives a connector no other access to it.
    """
    for variables in variables_of(frame):
        core = variables.get("self")
        if callable(getattr(getattr(core, "model_executor", None), "collective_rpc", None)):
            return core
    return None


def _checked(configs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``configs``.

    Raises:
        ConfigError: a stage has no layers with KV.
    """
    for stage, config in enumerate(configs):
        if not any(group.layer_names for group in config.kv_cache_groups):
            raise ConfigError(
                f"pipeline stage {stage} has no layer with KV; set VLLM_PP_LAYER_PARTITION so that each stage has one"
            )
    return configs
