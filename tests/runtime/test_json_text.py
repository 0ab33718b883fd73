"""JSON text from outside: what is no JSON is a ValueError, however it is damaged."""

from __future__ import annotations

import pytest

from tiering.runtime.json_text import parse_json


def test_values_are_those_of_json() -> None:
    assert parse_json('{"a": [1, null]}') == parse_json(b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (b"\xff\xfe\x00", "can't decode|truncated"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_other_text_is_a_value_error(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)
