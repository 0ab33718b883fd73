"""Code shared by both connector modes: engine protocols, KV events, reports, statistics and metrics."""
