"""Eviction policies, one per file, shared by the primary tier and by tiers of slots."""
