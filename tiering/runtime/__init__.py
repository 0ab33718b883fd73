"""The process-level helpers: forks, the owner thread of a manager, news, rate limits.

This package imports only the errors.
"""
