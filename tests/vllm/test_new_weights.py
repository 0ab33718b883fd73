"""New weights in a running engine, without the connector's reset: no answer from KV of other weights."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_llama
from tests.vllm.rig import (
    BLOCK,
    BLOCK_BYTES,
    MAX_LEN,
    NUM_BLOCKS,
    Engine,
    answers_without_tiers,
    engine,
    prompt,
    transfer_config,
    whole_blocks,
    wrong,
)
from tiering.engines.vllm.new_weights import WeightWatch

PROMPTS, LATER = [prompt(seed) for seed in range(3)], [prompt(seed) for seed in range(3, 6)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES


def norms(model: Path) -> list[tuple[str, Any]]:
    """Return other weights of a model's norms, which vLLM's CPU build keeps as they are."""
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    return [(name, tensor * 3 + 0.5) for name, tensor in tensors.items() if "layernorm" in name]


def write_other_norms(directory: Path, model: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **dict(norms(model))}, file, metadata={"format": "pt"})
    return directory


def by_vllm(running: Engine, model: Path, other: Path) -> None:
    """Let vLLM read other weights from a directory."""
    running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})


def by_function(running: Engine, model: Path, other: Path) -> None:
    """Let a function of one's own load weights in the workers, as trainers do."""
    weights = norms(model)
    running.llm.apply_model(lambda module: module.load_weights(weights) and None)


def in_place(running: Engine, model: Path, other: Path) -> None:
    """Let a function of one's own copy weights into the parameters."""
    weights = dict(norms(model))

    def write(worker: Any) -> None:
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])

    running.llm.collective_rpc(write)


class Extension:
    """An extension of vLLM's worker, with methods whose names say nothing of weights."""

    model_runner: Any

    def step(self, model: str) -> None:
        """Copy weights into the parameters, as trainers do."""
        weights = dict(norms(Path(model)))
        for name, parameter in self.model_runner.get_model().named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])


def by_extension(running: Engine, model: Path, other: Path) -> None:
    """Call a method of one's own, which is in an extension of vLLM's worker."""
    running.llm.collective_rpc("step", args=(str(model),))


def by_transfer(running: Engine, model: Path, other: Path) -> None:
    """Let vLLM's engine of weight transfers receive them."""
    running.llm.collective_rpc("start_weight_update")
    running.llm.collective_rpc("update_weights", kwargs={"update_info": {"model": str(model)}})
    running.llm.collective_rpc("finish_weight_update")


def transfers() -> Any:
    """Return vLLM's configuration of a transfer of weights through files, which patches parameters."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    class Files(WeightTransferEngine):  # type: ignore[misc]
        update_info: Any = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.update_info = update_info

        def finish_weight_update(self) -> None:
            weights = dict(norms(Path(self.update_info["model"])))
            for name, parameter in self.model.named_parameters():
                if name in weights:
                    parameter.data.copy_(weights[name])

        def _do_nothing(self, *_: Any) -> None: ...

        init_transfer_engine = start_weight_update = receive_weights = shutdown = _do_nothing

    if "files" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("files", Files)
    return WeightTransferConfig(backend="files")


def directly(running: Engine, model: Path, other: Path) -> None:
    """Load weights into the model of this process, without a call of vLLM's."""
    core = running.llm.llm_engine.engine_core.engine_core
    core.model_executor.driver_worker.model_runner.get_model().load_weights(norms(model))


Way = Callable[[Engine, Path, Path], None]


def exclusive(path: Path) -> dict[str, Any]:
    return {"primary": {"capacity": "64MiB", "inclusion": "exclusive"}}


def on_disk(path: Path) -> dict[str, Any]:
    disk = {"type": "local", "path": str(path), "capacity": "64MiB"}
    return {"primary": {"capacity": "64MiB"}, "secondary": [disk]}


@pytest.mark.parametrize(
    ("way", "watched", "stack_on"),
    [
        *((by_vllm, watched, on_disk) for watched in (True, False)),
        *((way, True, on_disk) for way in (by_function, in_place)),
        *((way, watched, exclusive) for way in (by_extension, by_transfer) for watched in (True, False)),
        *((directly, watched, on_disk) for watched in (True, False)),
    ],
)
def test_no_answer_comes_from_kv_of_other_weights(
    way: Way,
    watched: bool,
    stack_on: Callable[[Path], dict[str, Any]],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the watch, answers are wrong, later ones with the old weights too; the test sees both."""
    if not watched:
        monkeypatch.setattr(WeightWatch, "check", lambda self, **named: None)
    other = write_llama(tmp_path / "other", 1) if way is by_vllm else write_other_norms(tmp_path / "other", llama)
    old, new = (answers_without_tiers(model, [*PROMPTS, *LATER]) for model in (llama, other))
    assert wrong(old, new) == [*range(6)]
    stack, options = stack_on(tmp_path / "disk"), dict[str, Any](worker_extension_cls=f"{__name__}.Extension")
    if way is by_transfer:
        options |= {"weight_transfer_config": transfers(), "async_scheduling": True}
    with engine(llama, stack, **options) as running:
        assert wrong(running.ask(PROMPTS), old[:3]) == []
        (running.evict if stack_on is exclusive else running.settle)()
        way(running, llama, other)
        if way is not directly:  # where nothing is called, nothing is known before vLLM's reset
            assert wrong(running.ask(LATER), new[3:]) == []
            running.settle()
        assert running.llm.reset_prefix_cache()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, new[:3]) == [], loaded == 0) == (watched, watched)
        running.evict()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, new[:3]) == [], loaded) == (watched, ALL)
    if stack_on is on_disk:
        with engine(llama, stack) as restarted:
            answers = restarted.ask([*PROMPTS, *LATER])
            assert (wrong(answers, old) == []) == (watched or way is directly)


def test_a_reset_waits_for_a_worker_as_long_as_a_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped worker does not answer; vLLM fails a step after this time."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")
    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": MAX_LEN}
    settings |= {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": BLOCK, "distributed_executor_backend": "mp"}
    stack = {"primary": {"capacity": "4MiB"}}
    llm = LLM(str(llama), **settings, kv_transfer_config=transfer_config(stack))
    core = llm.llm_engine.engine_core.engine_core
    (worker,) = core.model_executor.workers
    half, resets = core.scheduler.connector.scheduler_half, []
    monkeypatch.setattr(half, "reset_cache", lambda reset=half.reset_cache: resets.append(reset()))
    try:
        os.kill(worker.proc.pid, signal.SIGSTOP)
        for number in (1, 2):
            assert llm.reset_prefix_cache()
            assert resets == [True] * number
    finally:
        os.kill(worker.proc.pid, signal.SIGKILL)
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
