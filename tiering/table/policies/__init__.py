"""The eviction policies, one per file."""
