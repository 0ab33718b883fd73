"""The demonstration: one workload on real text, in four acts and two negative controls; run it with ``make demo``."""
