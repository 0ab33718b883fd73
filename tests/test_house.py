"""The script that counts lines, rooms and the contract of a tier."""

from __future__ import annotations

import pytest

from scripts.house import FEATURES, arrows, code_lines, lines_of_features, methods, rows
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


def test_the_table_has_the_contract_of_a_tier_and_later_features_apart() -> None:
    table, features = dict(rows()), lines_of_features()
    assert hasattr(SecondaryTierManager, "submit_store")
    assert int(table["contract of a tier: methods"]) == methods(SecondaryTierManager) <= 15
    assert int(table["methods of its part that is optional"]) == methods(TierIntake)
    lines, rest = (int(table[name].replace(",", "")) for name in ("lines", "without modules of later features"))
    assert features.keys() == FEATURES.keys()
    assert lines - rest == sum(features.values()) > 10_000


def test_a_module_that_is_gone_or_counted_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in ("tiering/gone.py", "tiering/machine/link.py"):
        monkeypatch.setitem(FEATURES, "another", (pattern,))
        with pytest.raises(ValueError, match="another: a pattern has no module of its own"):
            lines_of_features()
