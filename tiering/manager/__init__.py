"""The tiering manager: cascades, promotions, the search for prefixes, and requests."""
