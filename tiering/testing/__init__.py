"""Test support for tiers: the conformance suites, stores with faults, and a fake clock.

Tests import it, also those of other people's tiers. No other package does.
"""
