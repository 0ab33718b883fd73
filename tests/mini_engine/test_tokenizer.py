"""The tokenizer is reversible and deterministic."""

from __future__ import annotations

import pytest

from examples.mini_engine import Tokenizer

TEXT = "def open(path, mode='r'):\n    return io.open(path, mode)\n\n# naïve, 123 times — 世界\n"


def test_text_comes_back_whole() -> None:
    tokenizer = Tokenizer.train([TEXT], 270)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_unknown_words_are_spelled_in_bytes() -> None:
    tokenizer = Tokenizer.train(["nothing of that"], 300)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode("世")) < 256


def test_the_same_texts_give_the_same_tokenizer() -> None:
    assert Tokenizer.train([TEXT], 280).words == Tokenizer.train([TEXT], 280).words


@pytest.mark.parametrize("token", [-0, 255, 10_000])
def test_any_token_can_be_shown(token: int) -> None:
    assert isinstance(Tokenizer(["a"]).decode([token]), str)
