"""All settings of vLLM: counted in the identity of KV, or known to change nothing but roundings.

The settings stand in ``settings_of_vllm.txt``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import vllm.config
from vllm import envs

from tiering.engines.vllm.identity import _ENVIRONMENT, _NOT_COUNTED

_TEXT = (Path(__file__).parent / "settings_of_vllm.txt").read_text().split("\n\n", 1)[1]
_KNOWN = {name: words.split() for name, words in re.findall(r"^(\w+): (.*(?:\n  .*)*)", _TEXT, re.MULTILINE)}
"""Words by class; those of classes without any word that matters are named under "whole"."""


def _classes() -> Iterator[type]:
    for found in pkgutil.iter_modules(vllm.config.__path__):
        module = importlib.import_module(f"vllm.config.{found.name}")
        yield from (
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
        )


def _words(name: str, *, counted: bool) -> set[str]:
    return {word.removeprefix("+") for word in _KNOWN[name] if word.startswith("+") == counted}


def test_each_setting_of_the_installed_vllm_is_counted_or_known_not_to_matter() -> None:
    found = {kind.__name__: set(vars(kind)["__dataclass_fields__"]) for kind in _classes()}
    found["environment"] = set(envs.environment_variables)
    unknown = {
        name: new
        for name, words in found.items()
        if name not in _KNOWN["whole"] and (new := words - {word.removeprefix("+") for word in _KNOWN.get(name, ())})
    }
    assert unknown == {}, "decide for each setting whether it changes KV or its layout, and write it down"


def test_what_is_said_to_be_counted_is_counted_by_the_code() -> None:
    """The lists in the code and in the text agree; the code may know what vLLM does not know any more."""
    assert _words("environment", counted=True) >= set(_ENVIRONMENT) & set(envs.environment_variables)
    assert not _words("environment", counted=False) & set(_ENVIRONMENT)
    memory_order = {"backend", "backend_per_kind"}
    for name, attribute in [("AttentionConfig", "attention_config"), ("KernelConfig", "kernel_config")]:
        assert _words(name, counted=False) == set(_NOT_COUNTED[attribute]) - memory_order
