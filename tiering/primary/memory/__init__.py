"""The memory of the primary tier: the shared region, its lock, its prefaulting, and the check for room."""
