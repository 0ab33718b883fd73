"""The contract of a secondary tier: its manager, jobs, options and counters.

The manager, the rooms above it and the tiers import it; the primary tier does not.
"""
