"""Indexes: the scheduler's knowledge of the blocks on a medium.

The generic tier, the replay and the tiers' own parts import it; the I/O side does not.
"""
