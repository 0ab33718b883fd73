"""Service of a tier: opening its medium, epochs, leases, health probes, overdue loads and failures.

Only the generic tier, its administration and the tiers' own parts import it.
"""
