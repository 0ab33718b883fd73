"""The conformance suite of tiers on a medium that engines share."""

from __future__ import annotations

from tiering.testing.tier_tests import K, TierTests


class SharedTierTests(TierTests):
    shared = True

    def test_one_engine_loads_what_another_has_stored(self) -> None:
        one, two = self.make_rig().open(), self.make_rig().open()
        try:
            one.store(K[:6])
            assert two.lookup(K[:8]) == 6
            assert two.load(K[:6]) == K[:6]
        finally:
            one.close()
            two.close()
