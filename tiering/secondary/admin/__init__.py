"""Administration of tiers for the command line: probes, contents, verification and collection, without an engine."""
