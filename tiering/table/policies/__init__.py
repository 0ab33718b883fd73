"""One eviction policy per file."""
