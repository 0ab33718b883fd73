"""The reset of the connector when new weights were written into a running engine. No vLLM is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiering.engines.vllm.new_weights import WeightWatch, count_loads, loads_of


class Model:
    def __init__(self) -> None:
        self.values = [torch.zeros(3000, dtype=torch.bfloat16), torch.full((4, 6), torch.nan).t(), torch.zeros(0)]

    def parameters(self) -> list[torch.Tensor]:
        return self.values

    def load_weights(self, weights: Any, strict: bool = False) -> Any:
        """Load what is no error."""
        if isinstance(weights, Exception):
            raise weights
        return {"loaded": weights, "strict": strict}


class Core:
    """vLLM's engine core with one worker in its process."""

    def __init__(self) -> None:
        self.model = type("Derived", (Model,), {})()
        self.config = SimpleNamespace(enable_sleep_mode=False)
        runner, configs = SimpleNamespace(get_model=lambda: self.model), SimpleNamespace(model_config=self.config)
        apply = lambda function: function(self.model)  # noqa: E731
        self.worker = SimpleNamespace(model_runner=runner, vllm_config=configs, apply_model=apply)
        self.model_executor = SimpleNamespace(collective_rpc=lambda method: [method(self.worker)])

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.worker, *args)] if callable(method) else [method]  # names of methods: not called


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(Model, "load_weights", Model.load_weights)
    core = Core()
    count_loads(core.model)
    return core


@pytest.fixture
def resets(core: Core) -> list[str]:
    resets: list[str] = []
    core.watch = WeightWatch(core, lambda: resets.append("reset"))  # type: ignore[attr-defined]
    return resets


def load(worker: Any, weights: Any) -> Any:
    return worker.model_runner.get_model().load_weights(weights, strict=True)


def test_a_call_during_which_a_model_loads_weights_ends_in_a_reset(core: Core, resets: list[str]) -> None:
    assert core.collective_rpc(load, args=("new",)) == [{"loaded": "new", "strict": True}]
    assert resets == ["reset"]
    assert core.collective_rpc(lambda worker: 1) == [1]
    assert resets == ["reset"]


def test_a_call_has_the_arguments_of_vllm_s_own(core: Core, resets: list[str]) -> None:
    """vLLM's core looks at them when the call comes from another process."""
    assert inspect.signature(core.collective_rpc) == inspect.signature(Core().collective_rpc)


def write(model: Any) -> None:
    model.values[0].data[-900:] = 1


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (write, True),
        (lambda model: setattr(model, "values", [torch.ones(3000), *model.values[1:]]), True),
        (lambda model: setattr(model, "values", model.values[:1]), True),
        (lambda model: model.values[0].sum(), False),
    ],
)
def test_a_function_of_the_caller_s_that_changes_parameters_ends_in_a_reset(
    core: Core, resets: list[str], function: Callable[[Any], Any], writes: bool
) -> None:
    core.collective_rpc(lambda worker: function(worker.model_runner.get_model()))
    assert resets == ["reset"] * writes


@pytest.mark.parametrize(("function", "writes"), [(write, True), (lambda model: len(model.values), False)])
def test_so_does_one_that_gets_the_model(
    core: Core, resets: list[str], function: Callable[[Any], Any], writes: bool
) -> None:
    core.collective_rpc("apply_model", args=(function,))
    assert resets == ["reset"] * writes


def test_parameters_that_may_be_asleep_are_not_read(
    core: Core, resets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "parameters", lambda self: pytest.fail("they are read"))
    core.config.enable_sleep_mode = True
    assert core.collective_rpc(lambda worker: 1) == [1]
    assert resets == ["reset"]


def test_workers_that_answer_too_late_are_not_asked(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be waited for without a limit, and their next answer is the late one."""
    resets: list[str] = []
    monkeypatch.setattr(core, "collective_rpc", late)
    core.model_executor.collective_rpc = lambda method: pytest.fail("they are asked")
    WeightWatch(core, lambda: resets.append("reset"))
    with pytest.raises(TimeoutError):
        core.collective_rpc("check_health", timeout=1.0)
    assert resets == ["reset"]


def late(method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
    raise TimeoutError


def test_a_load_that_fails_half_way_ends_in_a_reset(core: Core, resets: list[str]) -> None:
    with pytest.raises(ValueError, match="half way"):
        core.collective_rpc(load, args=(ValueError("half way"),))
    assert resets == ["reset"]


@pytest.mark.parametrize(
    ("method", "writes"),
    [
        *((name, True) for name in ("reload_weights", "update_weights", "start_weight_update", "finish_weight_update")),
        *((name, True) for name in ("update_weight", "update_named_param", "batch_update_named_params")),
        *((name, False) for name in ("init_weight_transfer_engine", "compute_weight_checksums", "get_param_sums")),
        *((name, False) for name in ("list_loras", "check_health", "profile")),
    ],
)
def test_a_method_that_writes_weights_by_its_name_ends_in_a_reset(
    core: Core, resets: list[str], method: str, writes: bool
) -> None:
    assert core.collective_rpc(method, timeout=1.0) == [method]
    assert resets == ["reset"] * writes


def test_workers_that_do_not_answer_may_have_new_weights(core: Core, resets: list[str]) -> None:
    def gone(method: Callable[..., Any]) -> list[int]:
        raise RuntimeError("gone")

    core.model_executor.collective_rpc = gone
    assert core.collective_rpc("list_loras") == ["list_loras"]
    assert resets == ["reset"]


def test_weights_that_were_loaded_without_a_call_are_noticed_when_vllm_empties_its_cache(
    core: Core, resets: list[str]
) -> None:
    manager = SimpleNamespace(reset_prefix_cache=lambda: resets.append("own"))
    core.watch.bind(manager)  # type: ignore[attr-defined]
    manager.reset_prefix_cache()
    core.model.load_weights("new")
    manager.reset_prefix_cache()
    assert resets == ["own", "reset", "own"]


def test_loads_are_counted_once_per_call_and_model_whichever_class_has_the_method(core: Core) -> None:
    another = Core()
    another.model.load_weights("the first")
    count_loads(another.model)
    core.model.load_weights("new")
    assert [loads_of(core.worker), loads_of(another.worker)] == [1, 0]
    count_loads(None)


def test_without_vllm_s_core_a_line_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    watch = WeightWatch(None, lambda: pytest.fail("nothing is known to have changed"))
    watch.check(named=True)
    assert "reset all caches" in caplog.text
