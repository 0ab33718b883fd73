"""Refusals before vLLM loads weights: invalid stacks, duplicate connectors, unknown interfaces."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.rig import engine, transfer_config
from tiering.engines.vllm import interface as vllm_interface
from tiering.engines.vllm.interface import check_methods, check_names, check_version
from tiering.engines.vllm.lookup import LookupCheck, StartupError
from tiering.errors import ConfigError

RIGHT = {"primary": {"capacity": "8MiB"}}
WRONG = {"primary": {"capacity": "8MiB", "evicton": "lru"}}


@pytest.fixture(scope="module")
def no_weights(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that consists of its configuration alone."""
    model = tmp_path_factory.mktemp("no weights")
    shutil.copy(llama / "config.json", model)
    return model


def several(*stacks: dict[str, Any]) -> dict[str, Any]:
    """Return a MultiConnector of one of ours for each of these stacks, and an idle connector."""
    idle = {
        "kv_connector": "IdleConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.vllm.idle_connector",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*map(transfer_config, stacks), idle]},
    }


def test_a_wrong_stack_is_the_last_line_of_a_server_that_has_no_weights_to_load(
    no_weights: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(no_weights),
        "--host",
        "127.0.0.1",
    ]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--kv-transfer-config", json.dumps(transfer_config(WRONG))]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=100, check=False)
    lines = log.read_text().strip().splitlines()
    assert done.returncode != 0
    assert "did you mean eviction?" in lines[-1]
    assert not [line for line in lines if "EngineCore" in line], "no other process was started"


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (transfer_config(WRONG), "did you mean eviction"),
        (transfer_config({"mode": "simple", **RIGHT, "block_size": 64}), "no meaning in mode simple"),
        ({**transfer_config(RIGHT), "kv_role": "kv_producer"}, 'set "kv_both"'),
        (several(WRONG), "did you mean eviction"),
        (several(RIGHT, RIGHT), "names TieringConnector more than once"),
    ],
)
def test_vllm_refuses_its_configuration(no_weights: Path, transfer: Any, message: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(no_weights), skip_tokenizer_init=True, kv_transfer_config=transfer)
    with pytest.raises(StartupError, match=message):
        arguments.create_engine_config()


@pytest.mark.parametrize("transfer", [transfer_config(RIGHT), several(RIGHT)])
def test_vllm_refuses_a_parallelism_whose_workers_cannot_share_a_cpu_tier(no_weights: Path, transfer: Any) -> None:
    refuses(no_weights, transfer, "use mp", distributed_executor_backend="external_launcher")


def test_vllm_refuses_pipeline_stages_in_mode_simple(no_weights: Path) -> None:
    transfer = transfer_config({"mode": "simple", **RIGHT})
    refuses(no_weights, transfer, "leave mode out.*, or tensor parallelism", pipeline_parallel_size=2)
    accepted(no_weights, transfer_config(RIGHT), pipeline_parallel_size=2)


def accepted(no_weights: Path, transfer: Any, **options: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(no_weights), skip_tokenizer_init=True, kv_transfer_config=transfer, **options)
    arguments.create_engine_config()


def refuses(no_weights: Path, transfer: Any, message: str, **options: Any) -> None:
    with pytest.raises(StartupError, match=message):
        accepted(no_weights, transfer, **options)


@pytest.mark.parametrize("transfer", [transfer_config(RIGHT), several(RIGHT)])
def test_vllm_accepts_its_configuration_and_finds_the_class_by_name(no_weights: Path, transfer: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(no_weights), skip_tokenizer_init=True, kv_transfer_config=transfer
    ).create_engine_config()
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert KVConnectorFactory.get_connector_class_by_name("TieringConnector").__name__ == "TieringConnector"


@pytest.mark.parametrize("mode", ["tiering", "simple"])
@pytest.mark.parametrize("inline", [True, False])
def test_events_that_nobody_would_take_are_refused_with_the_option_that_publishes_them(
    mode: str, inline: bool, tmp_path: Path
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(f"mode: {mode}\nevents: true\nprimary: {{capacity: 8MiB}}\n")
    extra = {"mode": mode, "events": True, **RIGHT} if inline else {"config": str(stack)}
    kv_transfer_config = SimpleNamespace(**transfer_config(extra))
    with pytest.raises(StartupError, match=r"^events: has no effect in vLLM.*--kv-events-config"):
        LookupCheck().check(sys._getframe())
    assert kv_transfer_config


def test_each_configuration_is_checked_once(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("primary: {capacity: 8MiB}")
    lookups = LookupCheck()

    def look_up() -> None:
        kv_transfer_config = SimpleNamespace(**transfer_config({"config": str(stack)}))
        lookups.check(sys._getframe())
        assert kv_transfer_config

    look_up()
    stack.write_text("wrong")
    look_up()


@pytest.mark.parametrize(("capacity", "told"), [("64KiB", True), ("64MiB", False)])
def test_an_engine_whose_cpu_tier_is_not_larger_than_its_own_cache_says_at_the_start_that_it_brings_nothing(
    llama: Path, capacity: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "kv_tiering.vllm"), engine(llama, {"primary": {"capacity": capacity}}):
        assert ("brings nothing" in caplog.text) is told


def test_a_second_connector_of_one_engine_is_refused_when_it_is_built(llama: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    from tiering.engines.vllm import connector as adapter

    arguments = EngineArgs(model=str(llama), skip_tokenizer_init=True, kv_transfer_config=transfer_config(RIGHT))
    config = arguments.create_engine_config()
    first = adapter.TieringConnector.__new__(adapter.TieringConnector)
    claim = (config.kv_transfer_config.engine_id, str(KVConnectorRole.WORKER))
    adapter._built[claim] = first
    with set_current_vllm_config(config), pytest.raises(ConfigError, match="write all tiers into one stack"):
        adapter.TieringConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[]))
    assert adapter._built[claim] is first


# ---------------------------------------------------------------------------------------------- versions and interfaces


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Return the warnings in the connector's log."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    vllm_interface.logger.addHandler(handler)
    yield told
    vllm_interface.logger.removeHandler(handler)


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.33.1rc1"])
def test_tested_versions_need_no_words(version: str, warnings: list[str]) -> None:
    check_version(version)
    assert warnings == []


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "dev", "0.0.0"])
def test_versions_that_are_newer_or_have_no_number_are_tried_with_a_warning(version: str, warnings: list[str]) -> None:
    check_version(version)
    assert len(warnings) == 1


def test_an_old_version_is_refused() -> None:
    with pytest.raises(StartupError, match="too old"):
        check_version("0.28.3")


def test_this_vllm_has_every_name_that_is_imported() -> None:
    check_names("0.99.0")


def test_a_name_or_module_that_vllm_has_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (("vllm.platforms", "current_platform lost"), ("vllm.no_such_module", "anything"))
    monkeypatch.setattr(vllm_interface, "NEEDED", needed)
    with pytest.raises(
        StartupError, match=r"vLLM 0\.99\.0 .*vllm\.platforms has no lost; there is no module vllm\.no_such_module"
    ):
        check_names("0.99.0")


class Base:
    """A stand-in for vLLM's base class of connectors."""

    def handle(self, metadata: object) -> None:
        return

    @classmethod
    def build(cls, data: object = None) -> None:
        return


class RenamedBase(Base):
    def handle(self, metadata: object, step: int) -> None:  # type: ignore[override]
        return


class Connector(Base):
    def handle(self, metadata: object) -> None:
        return

    @classmethod
    def build(cls, data: object = None) -> None:
        return


def test_methods_are_compared_with_those_that_vllm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_interface, "HOOKS", ("handle", "build"))
    check_methods("0.99.0", Connector, Base)
    with pytest.raises(StartupError, match="handle: too many positional arguments"):
        check_methods("0.99.0", Connector, RenamedBase)
    monkeypatch.setattr(vllm_interface, "HOOKS", ("handle", "prepare_step"))
    with pytest.raises(StartupError, match="Base has no prepare_step"):
        check_methods("0.99.0", Connector, Base)
