"""The script that counts lines, rooms and the contract of a tier."""

from __future__ import annotations

from scripts.house import arrows, code_lines, contract, rows
from tiering.tier import SecondaryTierManager


def test_lines_of_code_are_without_comments_docstrings_and_blank_lines() -> None:
    text = (
        '"""Two\nlines."""\n\n# a comment\nx = """\na string\n"""\n\n\ndef f() -> int:\n    """Doc."""\n    return 1\n'
    )
    assert code_lines(text) == 5


def test_arrows_lead_from_room_to_room() -> None:
    found = arrows()
    assert found["tiering.manager", "tiering.api"] > 0
    assert not [pair for pair in found if pair[0] == pair[1]]


def test_the_table_has_the_contract_of_a_tier() -> None:
    methods, attributes = contract()
    assert hasattr(SecondaryTierManager, "submit_store")
    assert f"{methods}, {attributes}" in dict(rows()).values()
    assert methods > 10
