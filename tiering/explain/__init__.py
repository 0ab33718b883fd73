"""The causes of misses: for each prompt token that a request computed, why no tier served it.

This package imports only ``tiering.api``, ``tiering.runtime`` and the errors. The connector and the commands import it.
"""
