"""The primary tier: rows in CPU memory, the only tier with direct GPU transfers."""
