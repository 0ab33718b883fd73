"""Secondary tiers: the generic tier, its indexes, its I/O side and the layers around a store."""
