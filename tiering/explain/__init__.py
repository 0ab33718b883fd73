"""The causes of misses: for each prompt token that a request computed, why no tier served it."""
