"""The tiering manager: cascades, promotions, prefix search and requests."""
