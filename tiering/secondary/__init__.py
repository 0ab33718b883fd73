"""Secondary tiers: the generic tier, its indexes, its I/O side and the layers around a store.

The manager, the packages above it and the tiers import it; the primary tier does not.
"""
