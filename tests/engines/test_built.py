"""Marks of workers: digests of the configuration that their models were built from. No vLLM is needed."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.built import UNKNOWN, changed_configs, settings_mark, worker_mark

IDENTITY = ModelIdentity("model", "weights", "float32", "layout", {"norm": 1})


class Config:
    """A configuration of transformers, with parts."""

    def __init__(self, kind: str, **words: Any) -> None:
        self.model_type = kind
        self.words = words

    def to_dict(self) -> dict[str, Any]:
        words = {word: item.to_dict() if isinstance(item, Config) else item for word, item in self.words.items()}
        return {"model_type": self.model_type, "transformers_version": "5", **words}


class Module:
    """A module of torch."""

    def __init__(self, *parts: Module, **held: Any) -> None:
        self.parts = parts
        self.__dict__.update(held)

    def modules(self) -> Any:
        yield self
        for part in self.parts:
            yield from part.modules()


def whole(tuning: bool = True, **words: Any) -> Config:
    """Return the configuration of a model with a language model in it."""
    return Config("whole", text_config=Config("text", tuning=tuning, architectures=None), **words)


def held_by_vllm(config: Config) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config))


def test_a_model_that_was_built_from_its_configuration_and_parts_of_it_has_no_changes() -> None:
    config = whole()
    part = copy.deepcopy(config.words["text_config"])
    part.words |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}  # vLLM sets them in copies
    model = Module(Module(config=part, vllm_config=held_by_vllm(part)), config=config, scale=0.5, layers=[])
    assert changed_configs(model, config) == set()


@pytest.mark.parametrize("hold", [lambda part: {"config": part}, lambda part: {"vllm_config": held_by_vllm(part)}])
def test_a_changed_copy_of_a_part_is_a_change(hold: Any) -> None:
    config = whole()
    changes = []
    for tuning in (False, 2):
        part = copy.deepcopy(config.words["text_config"])
        part.words["tuning"] = tuning
        changes.append(changed_configs(Module(Module(**hold(part)), config=config), config))
    assert [len(found) for found in changes] == [1, 1]
    assert changes[0] != changes[1]


def test_what_differs_between_processes_alone_is_no_part_of_a_mark() -> None:
    places = [object(), object()]
    marks = {Worker(Module(config=whole(tuning=False, place=place))).builds_its_connector(whole()) for place in places}
    assert len(marks) == 1
    words = Module(config=whole(tuning=False, words={"b", "a", "c"}))
    assert '["a", "b", "c"]' in min(changed_configs(words, whole()))


class Worker:
    """A worker of vLLM."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_model(self) -> Any:
        return self.model

    def builds_its_connector(self, config: Config) -> bytes:
        def create() -> bytes:
            return worker_mark(IDENTITY, config, sys._getframe())

        return create()


def test_a_worker_whose_model_has_no_changes_has_the_mark_of_the_schedulers_side() -> None:
    config = whole()
    assert Worker(Module(config=config)).builds_its_connector(config) == settings_mark(IDENTITY)


def test_settings_and_changes_make_different_marks() -> None:
    other = ModelIdentity("model", "weights", "float32", "layout", {"norm": 2})
    half = ModelIdentity("model", "weights", "bfloat16", "layout", {"norm": 1})
    changed = Worker(Module(config=whole(tuning=False))).builds_its_connector(whole())
    assert len({settings_mark(IDENTITY), settings_mark(other), settings_mark(half), changed}) == 4


class Broken(Module):
    """A model that cannot be examined."""

    def modules(self) -> Any:
        raise RuntimeError("foreign code")


def test_a_worker_whose_model_cannot_be_examined_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    assert Worker(Broken()).builds_its_connector(whole()) == UNKNOWN
    assert worker_mark(IDENTITY, whole(), None) == UNKNOWN
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
