"""The request's fields for the tiers: accepted values, and errors that name the invalid field."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import make_spec, prompt, run_prompt
from tests.manager_rig import ManagerRig
from tiering.api import masking
from tiering.api.namespace import ModelIdentity
from tiering.api.request import ReqContext
from tiering.api.request_policy import RequestPolicy, parse_request_policy
from tiering.config.stack import open_manager
from tiering.config.stack_file import load_stack
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.tracked import policy_of
from tiering.errors import ConfigError
from tiering.primary.memory.region import PAGE
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="test")


def test_without_parameters_everything_is_allowed() -> None:
    assert parse_request_policy(None) == parse_request_policy({"other": 1}) == RequestPolicy()


def test_every_word_is_read() -> None:
    words = {"load": False, "store": False, "max_load_tokens": 3, "max_store_tokens": 0, "tiers": ["local"]}
    assert parse_request_policy({"kv_tiering": words}) == RequestPolicy(False, False, 3, 0, frozenset({"local"}))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"tiers": 5}, "tiers"),
        ({"tiers": "local"}, "tiers"),
        ({"tiers": [1]}, "tiers"),
        ({"tiers": {"local": 1}}, "tiers"),
        ({"load": "no"}, "load"),
        ({"store": 0}, "store"),
        ({"max_load_tokens": -1}, "max_load_tokens"),
        ({"max_store_tokens": True}, "max_store_tokens"),
        ({"max_store_tokens": 1.5}, "max_store_tokens"),
        ({"lod": True}, "lod"),
    ],
)
def test_a_wrong_word_is_named(words: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_transfer_params\.kv_tiering\.{field}"):
        parse_request_policy({"kv_tiering": words})


@pytest.mark.parametrize("computes_all", [False, True])
def test_nothing_is_loaded_for_a_request_whose_whole_prompt_must_be_computed(computes_all: bool) -> None:
    params = {"kv_tiering": {"max_store_tokens": 5}}
    request: Any = SimpleNamespace(kv_transfer_params=params, skip_reading_prefix_cache=computes_all)
    assert policy_of(request) == RequestPolicy(load=not computes_all, max_store_tokens=5)


@pytest.mark.parametrize("params", [{"kv_tiering": 1}, {"kv_tiering": []}, ["kv_tiering"], "kv_tiering"])
def test_parameters_of_another_shape_are_refused(params: Any) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_params"):
        parse_request_policy(params)


def test_the_words_of_routers_are_ours() -> None:
    assert parse_request_policy({"max_load_tokens": 7, "max_offload_tokens": 5}) == RequestPolicy(
        max_load_tokens=7, max_store_tokens=5
    )
    both = {"max_load_tokens": 7, "max_offload_tokens": 5, "kv_tiering": {"max_load_tokens": 9, "max_store_tokens": 3}}
    assert parse_request_policy(both) == RequestPolicy(max_load_tokens=7, max_store_tokens=3)


@pytest.mark.parametrize("word", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("value", ["12", -1, True, 1.5])
def test_a_wrong_word_of_a_router_is_named(word: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"kv_transfer_params\.{word}: "):
        parse_request_policy({word: value})


WRONG = [{"kv_tiering": {"tiers": 5}}, ["kv_tiering"], {"max_offload_tokens": "all"}]


@pytest.mark.parametrize("params", WRONG)
def test_a_request_with_a_wrong_wish_neither_loads_nor_stores(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(*range(3))
    tier = FakeTier(held={keys[1]})
    rig = ManagerRig(4, [tier])
    rig.store(keys[:1])
    wrong = ReqContext("wrong", params)
    rig.manager.on_new_request(wrong)
    assert [rig.manager.lookup(key, wrong) for key in keys[:2]] == [False, False]
    assert rig.manager.match_prefix(keys, wrong) == (0, False)
    output = rig.manager.prepare_store(keys, wrong)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    assert rig.manager.match_prefix(keys[:2], rig.ctx) == (2, True)
    assert sum("wrong" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("params", WRONG)
def test_a_wrong_wish_is_told_once_in_the_whole_stack(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    stack = load_stack({"primary": {"capacity": 16 * PAGE}, "secondary": [{"type": "memory", "capacity": "1MiB"}]})
    with caplog.at_level(logging.WARNING, "kv_tiering"), open_manager(stack, 1000, MODEL) as manager:
        manager.on_new_request(ReqContext("wrong", params))
        scheduler = OffloadingConnectorScheduler(make_spec(manager=manager))  # type: ignore[arg-type]
        request = prompt(16, "mistaken", kv_transfer_params=params)
        assert not run_prompt(scheduler, request, [1, 2, 3, 4]).reqs_to_store
        scheduler.request_finished(request, [])
    told = [record.name for record in caplog.records if "kv_transfer_params" in record.message]
    assert told == ["kv_tiering.manager", "kv_tiering.connector"]


def test_a_request_that_names_other_tiers_reaches_no_other() -> None:
    keys = keys_of(*range(2))
    tier = FakeTier("local", held=set(keys))
    rig = ManagerRig(4, [tier])
    other = rig.request("r2", tiers=["s3"])
    assert rig.manager.lookup(keys[0], other) is False
    rig.store(keys[:1], other)
    assert not [entry for entry in tier.log if entry[0] == "submit_store"]
    assert rig.manager.lookup(keys[1], rig.request("r3", tiers=["local"])) is None


def lengths_searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are searched for secrets during the test."""
    searched: list[int] = []
    mask = masking.mask_text

    def masked(text: str) -> str:
        searched.append(len(text))
        return mask(text)

    monkeypatch.setattr(masking, "mask_text", masked)
    return searched


@pytest.mark.parametrize(
    "words",
    [
        {"a\nERROR forged\x1b[31m": 1},
        {"://" * 350_000: 1},
        {"load": "://" * 350_000},
        {"load": ["://" * 1000] * 1000},
        {"tiers": {"://" * 350_000: 1}},
        {"tiers": [["://" * 1000] * 1000]},
        {"max_load_tokens": [[[["://" * 1000] * 10] * 10] * 10]},
    ],
)
def test_the_text_of_a_request_makes_no_long_or_forged_log_line(
    words: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = lengths_searched(monkeypatch)
    stack = load_stack({"primary": {"capacity": 16 * PAGE}})
    with open_manager(stack, 1000, MODEL) as manager:
        searched.clear()
        caplog.clear()
        manager.on_new_request(ReqContext("r\nERROR forged\x1b[31m" + "x" * 1_000_000, {"kv_tiering": words}))
    (record,) = (record for record in caplog.records if "kv_transfer_params" in record.message)
    assert record.message.isprintable()
    assert len(record.message) < 500
    assert sum(searched) < 5000


def test_a_log_line_of_any_length_is_masked_in_bounded_time_and_keeps_its_secrets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = lengths_searched(monkeypatch)
    masking.record_secrets("password", "hunter2-hunter2")
    logger = logging.getLogger("kv_tiering.long")
    masking.guard_logs()
    for begin in (0, masking._LONGEST_LINE - 5, masking._LONGEST_LINE + masking._LONGEST_SECRET - 5):
        searched.clear()
        caplog.clear()
        logger.warning("%s", "x" * begin + "hunter2-hunter2" + "y" * 1_000_000)
        (record,) = caplog.records
        assert "hunter" not in record.message
        assert len(record.message) <= max(searched) <= 30_000
