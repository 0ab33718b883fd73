"""Benchmarks that ``make bench`` runs: one module ``bench_*.py`` per subject.

Each module has ``run(bench: Bench) -> None``.
"""
