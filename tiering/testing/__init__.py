"""Test support for tiers: the conformance suites, stores and devices with faults, and a fake clock."""
