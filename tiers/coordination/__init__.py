"""Coordination of a fleet over a Valkey or Redis server: presence directory, claims, and touches.

Only tiers import this package. All content of the server is a hint, may vanish at any time, and expires by itself.
"""
