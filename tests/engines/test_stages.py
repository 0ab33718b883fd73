"""The exchange of pipeline stages' KV-cache configurations, with doubles of vLLM's objects."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm import stages
from tiering.engines.vllm.stages import stages_of_engine, stages_of_worker
from tiering.errors import ConfigError


def config(*layers: str) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(layers))])


FIRST, SECOND = config("a"), config("b", "c")


def worker(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, Any], workers: int = 4) -> tuple[Any, ...]:
    """Return what a worker of two stages gets if its group exchanges ``found``: rank and configuration."""

    def gather(into: list[Any], own: Any, group: str) -> None:
        assert own in found
        assert group == "processes"
        into[:] = found

    monkeypatch.setattr(stages, "all_gather_object", gather)
    group = SimpleNamespace(world_size=len(found), cpu_group="processes")
    rank, own = found[-1]
    parallel = SimpleNamespace(pipeline_parallel_size=2, world_size=workers, rank=rank)
    return stages_of_worker(own, parallel, lambda: group)


def test_a_worker_has_the_configurations_of_its_group_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker(monkeypatch, (1, FIRST), (3, SECOND)) == (FIRST, SECOND)


def test_one_stage_is_exchanged_with_nobody() -> None:
    assert stages_of_worker(FIRST, SimpleNamespace(pipeline_parallel_size=1), lambda: None) == (FIRST,)


@pytest.mark.parametrize("ranks", [(0, 1), (2, 0), (3, 1)])
def test_workers_that_are_numbered_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    with pytest.raises(ConfigError, match="not numbered stage by stage"):
        worker(monkeypatch, (ranks[0], FIRST), (ranks[1], SECOND))


def test_a_group_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not numbered stage by stage"):
        worker(monkeypatch, (0, FIRST), workers=1)


def test_a_stage_without_kv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="pipeline stage 1 has no layer with KV"):
        worker(monkeypatch, (0, FIRST), (2, config()))


class Executor:
    """vLLM's executor, whose workers have exchanged ``found``."""

    def __init__(self, *found: Any) -> None:
        self.found = found

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[Any]:
        return [method(stages, *args) for stages in self.found]


class Core:
    """vLLM's engine core, which builds the scheduler's connector."""

    def __init__(self, executor: Any) -> None:
        self.model_executor = executor

    def stages(self, count: int) -> tuple[Any, ...]:
        parallel = SimpleNamespace(pipeline_parallel_size=count)
        return stages_of_engine("first", parallel, sys._getframe(), lambda found, engine_id: found, "engine")


def test_the_scheduler_has_the_stages_that_all_workers_agree_on() -> None:
    both = ("first", "second")
    assert Core(Executor(both, both)).stages(2) == both
    assert Core(None).stages(1) == ("first",)
    with pytest.raises(ConfigError, match="different KV-cache configurations"):
        Core(Executor(both, ("first", "other"))).stages(2)
    with pytest.raises(ConfigError, match="executor is not found"):
        Core(None).stages(2)
