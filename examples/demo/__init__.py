"""The demonstration: one workload on real text, told in four acts and two attempts to cheat.  Run it with ``make demo``."""
