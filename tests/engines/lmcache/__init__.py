"""Tests of the L2 adapter for LMCache, over a stand-in for LMCache."""
