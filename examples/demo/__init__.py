"""The demonstration of ``make demo``: one workload on real text, four acts, two negative controls."""
