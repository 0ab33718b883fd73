"""Indexes: the scheduler's knowledge of the blocks on a medium."""
