"""Service of a tier: opening its medium, epochs, leases, health probes, overdue loads and failures."""
