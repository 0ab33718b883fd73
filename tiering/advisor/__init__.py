"""The live size advisor: estimates of the hit rate that other capacities of a tier would have.

Only the manager and packages above it import it, for their metrics and reports.
"""
