"""The script that counts lines, rooms and the contract of a tier."""

from __future__ import annotations

from scripts.house import arrows, code_lines, methods, rows
from tiering.tier import SecondaryTierManager, TierIntake


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
    table = dict(rows())
    assert hasattr(SecondaryTierManager, "submit_store")
    assert int(table["contract of a tier: methods"]) == methods(SecondaryTierManager) <= 15
    assert int(table["methods of its part that is optional"]) == methods(TierIntake)
