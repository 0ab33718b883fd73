"""The reset of the connector when new weights were written into a running engine. No vLLM is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiering.engines.vllm.new_weights import WeightWatch, loads_of

VLLM = "vllm.v1.worker.gpu_worker"


class Model:
    def __init__(self) -> None:
        self.values = [torch.zeros(3000, dtype=torch.bfloat16), torch.full((4, 6), torch.nan).t(), torch.zeros(0)]
        self.more = [torch.zeros(5, 8)[:, :5], torch.zeros(7, dtype=torch.uint8)[1:], torch.zeros(3, device="meta")]

    def parameters(self) -> list[torch.Tensor]:
        return self.values

    def buffers(self) -> Iterator[torch.Tensor]:
        yield from self.more

    def load_weights(self, weights: Any, strict: bool = False) -> Any:
        """Load what is no error."""
        if isinstance(weights, Exception):
            raise weights
        return {"loaded": weights, "strict": strict}


class Worker:
    """A worker of vLLM with an extension."""

    def __init__(self, core: Core) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: core.model)
        self.vllm_config = SimpleNamespace(model_config=core.config)

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        return function(self.model_runner.get_model())

    apply_model.__module__ = VLLM

    def __getattr__(self, name: str) -> Any:
        """Return a method of vLLM's that does nothing."""
        method = lambda: name  # noqa: E731
        method.__module__ = VLLM
        return method

    def extend(self, function: Callable[[Any], Any]) -> Any:
        """Do what an extension of the worker does, which is not vLLM's."""
        return function(self.model_runner.get_model())


class Core:
    """vLLM's engine core with one worker in its process."""

    def __init__(self) -> None:
        self.model: Any = type("Derived", (Model,), {})()
        self.config = SimpleNamespace(enable_sleep_mode=False)
        self.worker = Worker(self)
        self.model_executor = SimpleNamespace(collective_rpc=lambda method, timeout: [method(self.worker)])
        self.empties = True

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.worker, *args)] if callable(method) else [method]  # names that write: not called

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.empties


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(Model, "load_weights", Model.load_weights)
    return Core()


@pytest.fixture
def resets(core: Core) -> list[str]:
    resets: list[str] = []
    WeightWatch(core, lambda: resets.append("reset"))
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


def write_one(number: int, model: Any) -> None:
    """Change one value, of a parameter or a buffer, wherever it lies in memory."""
    tensor = [*model.values[:2], *model.more[:2], model.values[0]][number]
    tensor.data[-1 if number < 4 else 1234].view(-1)[-1] = 7


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (write, True),
        (lambda model: setattr(model, "values", [torch.ones(3000), *model.values[1:]]), True),
        (lambda model: setattr(model, "values", model.values[:1]), True),
        *((partial(write_one, number), True) for number in range(5)),
        (lambda model: model.values[0].sum(), False),
    ],
)
def test_a_function_of_the_caller_s_that_changes_parameters_ends_in_a_reset(
    core: Core, resets: list[str], function: Callable[[Any], Any], writes: bool
) -> None:
    core.collective_rpc(lambda worker: function(worker.model_runner.get_model()))
    assert resets == ["reset"] * writes
    core.collective_rpc("profile")
    assert resets == ["reset"] * writes


@pytest.mark.parametrize("method", ["apply_model", "extend"])
@pytest.mark.parametrize(("function", "writes"), [(write, True), (lambda model: len(model.values), False)])
def test_so_do_one_that_gets_the_model_and_a_method_of_an_extension(
    core: Core, resets: list[str], method: str, function: Callable[[Any], Any], writes: bool
) -> None:
    core.collective_rpc(method, args=(function,))
    assert resets == ["reset"] * writes


def test_parameters_that_may_be_asleep_are_not_read(
    core: Core, resets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "parameters", lambda self: pytest.fail("they are read"))
    core.config.enable_sleep_mode = True
    assert core.collective_rpc(lambda worker: 1) == [1]
    assert resets == ["reset"]


@pytest.mark.parametrize("asked", [False, True], ids=["a call", "the watch"])
def test_workers_that_answer_too_late_are_not_asked_again(core: Core, resets: list[str], asked: bool) -> None:
    """Their next answer is the late one."""
    if asked:
        core.model_executor.collective_rpc = late
        core.reset_prefix_cache()
    else:
        with pytest.raises(TimeoutError):
            core.collective_rpc(late)
    assert resets == ["reset"]
    core.model_executor.collective_rpc = lambda method, timeout: pytest.fail("they are asked")
    assert core.reset_prefix_cache(reset_connector=True)
    assert resets == ["reset"] * 2


def test_workers_are_asked_as_long_as_they_may_take_for_a_step(
    core: Core, resets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def ask(method: Callable[[Any], int], timeout: float) -> list[int]:
        limits.append(timeout)
        return [method(core.worker)]

    core.model_executor.collective_rpc = ask
    core.reset_prefix_cache()
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7")
    core.reset_prefix_cache()
    assert (limits, resets) == ([300.0, 7.0], [])


def late(method: Any, timeout: float = 0.0) -> list[Any]:
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
    def gone(method: Callable[..., Any], timeout: float) -> list[int]:
        raise RuntimeError("gone")

    core.model_executor.collective_rpc = gone
    assert core.collective_rpc("list_loras") == ["list_loras"]
    assert resets == ["reset"]


def test_weights_that_were_loaded_without_a_call_are_noticed_when_vllm_empties_its_cache(
    core: Core, resets: list[str]
) -> None:
    assert core.reset_prefix_cache()
    core.model.load_weights("new")
    assert resets == []
    assert core.reset_prefix_cache()
    assert core.reset_prefix_cache()
    assert resets == ["reset"]


def test_another_model_in_the_worker_is_noticed(core: Core, resets: list[str]) -> None:
    for number in (1, 2):
        core.model = Core().model
        core.model.load_weights("new")
        core.collective_rpc("load_model")
        assert resets == ["reset"] * number


def test_a_connector_that_stores_what_vllm_s_cache_still_has_is_reset_once_more(core: Core) -> None:
    resets: list[str] = []
    WeightWatch(core, lambda: resets.append("reset"), twice=True)
    assert core.reset_prefix_cache()
    assert resets == []
    core.collective_rpc("update_weights")
    core.empties = False
    assert not core.reset_prefix_cache()
    assert resets == ["reset"]
    core.empties = True
    assert core.reset_prefix_cache()
    assert core.reset_prefix_cache()
    assert resets == ["reset"] * 2


def test_two_connectors_watch_a_call_once(core: Core, resets: list[str]) -> None:
    """Otherwise, each call of vLLM's own methods would reset an engine that may sleep."""
    WeightWatch(core, lambda: resets.append("another's"))
    core.config.enable_sleep_mode = True
    core.collective_rpc("list_loras")
    assert resets == []
    core.collective_rpc(lambda worker: None)
    assert resets == ["reset", "another's"]


def test_loads_are_counted_once_per_call_and_model_whichever_class_has_the_method(core: Core) -> None:
    another = Core()
    another.model.load_weights("the first")
    before = [loads_of(core.worker), loads_of(another.worker)]
    core.model.load_weights("new")
    assert [loads_of(core.worker), loads_of(another.worker)] == [before[0] + 1, before[1]]
    core.model = SimpleNamespace()
    assert loads_of(core.worker) == loads_of(core.worker)


def test_without_vllm_s_core_a_line_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    WeightWatch(None, lambda: pytest.fail("nothing is known to have changed"))
    assert "reset all caches" in caplog.text
