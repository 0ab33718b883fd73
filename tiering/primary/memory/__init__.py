"""The memory of the primary tier: shared region, file locks, prefaulting, and the check for room.

Whoever opens or maps the region imports it; it imports no other module of the primary tier.
"""
