"""One concern per layer around a block store."""
