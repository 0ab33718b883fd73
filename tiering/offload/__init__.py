"""What both schedulers use: events, the engine's protocols, reports, rate limits, statistics and metrics."""
