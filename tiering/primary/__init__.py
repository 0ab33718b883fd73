"""The primary tier: rows in CPU memory, the only tier with direct GPU transfers.

The manager, the copies and the packages above them import it; tiers do not.
"""
