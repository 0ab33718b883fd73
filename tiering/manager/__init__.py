"""The tiering manager: cascades, promotions, prefix search and requests.

The configuration, the spec and the packages above them import it; tiers do not.
"""
