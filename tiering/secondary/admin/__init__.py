"""Administration of tiers for the command line, without an engine."""
