"""What a request may ask of the tiers, and that a wrong wish is an error which names the field, never a crash."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.manager.fakes import FakeTier, Rig, make_keys
from tiering.base import ReqContext, RequestPolicy, parse_request_policy
from tiering.connector.request_policy import policy_of
from tiering.errors import ConfigError


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


@pytest.mark.parametrize("params", [{"kv_tiering": {"tiers": 5}}, ["kv_tiering"]])
def test_the_manager_goes_on_after_a_wrong_wish(params: Any) -> None:
    tier = FakeTier(held=set(make_keys(0)))
    rig = Rig(4, [tier])
    wrong = ReqContext("wrong", params)
    rig.manager.on_new_request(wrong)
    assert rig.manager.lookup(make_keys(0)[0], wrong) is None
