"""The live size advisor: estimates of the hit rate that other capacities of a tier would have."""
