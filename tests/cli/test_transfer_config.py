"""Files with vLLM's configuration in place of a stack file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import kv_tiering
from tiering.cli.transfer_config import stack_at
from tiering.config.inline import read_adapter, read_storage, read_tier
from tiering.errors import ConfigError

STACK: dict[str, Any] = {"primary": {"capacity": "64MiB"}, "secondary": [{"type": "memory", "capacity": "64MiB"}]}
TIER = {"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier", **STACK}
STORAGE = {
    "backend_name": "kv_tiering",
    "module_path": "tiering.engines.sglang",
    "class_name": "KVTieringStorage",
    "interface_v1": 1,
    "prefetch_threshold": 64,
    "deadline": "2s",
    **STACK,
}
ADAPTER = {
    "type": "plugin",
    "module_path": "tiering.engines.lmcache",
    "class_name": "KVTieringAdapter",
    "shared": True,
    "adapter_params": {"deadline": "20s", "block_bytes": "1MiB", "revision": "r1", **STACK},
}
FS = {"type": "fs", "root_dir": "/var/cache/vllm"}


def offloading(*tiers: Any) -> dict[str, Any]:
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": list(tiers)}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def own(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "TieringConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def several(*connectors: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    "config",
    [
        offloading(TIER),
        offloading(FS, {"type": "kv_tiering", "locality": "LOCAL", "backpressure": {}, **STACK}),
        own(**STACK),
        several(own(**STACK), {"kv_connector": "NixlConnector"}),
        {"model": "org/model", "kv-transfer-config": offloading(TIER)},
        {"kv_transfer_config": json.dumps(offloading(TIER))},
        STORAGE,
        {"model-path": "org/model", "hicache-storage-backend-extra-config": json.dumps(STORAGE)},
        ADAPTER,
    ],
)
def test_the_stack_in_it_is_found(tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert [tier.type for tier in stack_at(str(file)).secondary] == ["memory"]


def test_a_stack_file_that_a_dictionary_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(json.dumps(STACK))
    tier = {"type": "kv_tiering", "config": str(tmp_path / "stack.yaml")}
    (tmp_path / "config.yaml").write_text(json.dumps(offloading(tier)))
    assert stack_at(str(tmp_path / "config.yaml")) == stack_at(str(tmp_path / "stack.yaml"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            offloading({**TIER, "secundary": []}),
            r"tiers\[0\]: secundary: unknown word; did you mean secondary",
        ),
        (
            offloading(FS, {**TIER, "secondary": [{"type": "local", "path": "/kv", "capcity": 1}]}),
            r"secondary_tiers\[1\]: (?s:.*)secondary\[0\].capcity: unknown word; did you mean capacity",
        ),
        (
            offloading({**TIER, "type": "KVTieringTeir"}),
            r"secondary_tiers\[0\].type: (?s:.*)should be KVTieringTier",
        ),
        (offloading(FS), "names no stack; allowed are TieringConnector"),
        (offloading(), "names no stack"),
        (offloading(TIER, {**TIER, "type": "kv_tiering"}), "names 2 stacks"),
        (several(own(**STACK), own(**STACK)), r"names 2 stacks .kv_connector_extra_config.connectors\[0\]"),
        (offloading("fs"), "secondary_tiers: (?s:.*)is not a list of mappings"),
        (own(**STACK, sharer_wat=1), "did you mean sharer_wait"),
        (own(**STACK, events=True), "kv_connector_extra_config: events: has no effect in vLLM"),
        ({"kv-transfer-config": "{"}, "is no JSON"),
        ({"kv-transfer-config": 7}, "is not a mapping with kv_connector"),
        ({**STORAGE, "class_name": "Storage"}, "class_name: 'Storage' is not KVTieringStorage"),
        ({**STORAGE, "deadlin": 1}, "deadlin: unknown word; did you mean deadline"),
        ({**STORAGE, "events": True}, "events: has no effect in SGLang"),
        ({"hicache-storage-backend-extra-config": {**STORAGE, "module_path": "other"}}, "module_path: 'other' is not"),
        ({"hicache-storage-backend-extra-config": "{"}, "is no JSON"),
        ({**ADAPTER, "class_name": "Adapter"}, "class_name: 'Adapter' is not KVTieringAdapter"),
        ({**ADAPTER, "type": "fs"}, "type: 'fs' is not plugin"),
        ({**ADAPTER, "adapter_params": None}, "adapter_params: None is not a mapping"),
        ({**ADAPTER, "adapter_params": {**STACK, "deadlin": 1}}, "adapter_params: deadlin: unknown word"),
        ({**ADAPTER, "adapter_params": STACK}, "revision: is missing: LMCache's keys"),
        ({**ADAPTER, "serde": {"type": "fp8"}}, "serde: "),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=text):
        stack_at(str(file))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"mode": "simple", "secondary": []}, "mode: simple needs the TieringConnector"),
        ({"secondary": []}, "secondary: is missing: vLLM has a CPU tier of its own"),
        (
            {"primary": {"capacity": "1GiB", "inclusion": "exclusive"}},
            "primary.inclusion: needs the TieringConnector",
        ),
        (
            {"primary": {"capacity": "1GiB", "promote_waiting": True}},
            "promote_waiting: needs the TieringConnector",
        ),
        (
            {"layout": "canonical", "secondary": [{"type": "local", "path": "/tmp/kv", "capacity": "1GiB"}]},
            "layout: needs the TieringConnector",
        ),
        ({"events": True}, "events: has no effect in vLLM"),
        ({"record_trace": {"path": "/tmp/trace"}}, "record_trace: needs the TieringConnector"),
        ({"hints": {"release": False}}, "hints: needs the TieringConnector"),
        (
            {"secondary": [{"type": "memory", "capacity": "1GiB", "load_or_compute": "auto"}]},
            r"secondary\[0\].load_or_compute: auto needs the TieringConnector",
        ),
        ({"locality": "NEAR"}, "locality: 'NEAR' is not allowed: it should be LOCAL or REMOTE"),
        ({"blocks_per_chunk": 2}, "blocks_per_chunk: unknown word"),
        ({"config": "stack.yaml"}, "primary: is part of a stack, but config names one already"),
    ],
)
def test_a_word_without_effect_there_is_refused_with_the_reason(words: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_tier({**TIER, **words})


def test_secrets_of_a_dictionary_are_masked() -> None:
    pool = {"type": "valkey", "url": "valkey://:hunter2secret@127.0.0.1:6379", "prefx": "x"}
    with pytest.raises(ConfigError) as error:
        read_tier({**TIER, "secondary": [pool]})
    assert "hunter2secret" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        read_storage({**STORAGE, "secondary": [pool]})
    assert "hunter2secret" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        read_adapter({**STACK, "secondary": [pool]})
    assert "hunter2secret" not in str(error.value)


def test_check_probes_the_tiers_of_such_a_file(tmp_path: Path) -> None:
    local = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(offloading({**TIER, "secondary": [local]})))
    done = kv_tiering("check", file, "--json", "--block-bytes", "64KiB")
    assert done.code == 0, done.out
    findings = json.loads(done.out)["findings"]
    assert any(found["tier"] == "local" and found["subject"] == "round trip" for found in findings)
