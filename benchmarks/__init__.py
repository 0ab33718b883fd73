"""Benchmarks: what ``make bench`` runs.  One module per subject, ``bench_*.py``, each with ``run(bench: Bench) ->
None``."""
