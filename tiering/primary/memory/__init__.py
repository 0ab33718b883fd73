"""The memory of the primary tier: shared region, file locks, prefaulting, and the check for room."""
