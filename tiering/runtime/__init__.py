"""The process-level helpers: pools of threads, forks, owner threads, news, rate limits.

This package imports only the errors.
"""
