"""The process-level helpers: threads and their starter, forks, owner threads, news, rate limits.

This package imports only the errors.
"""
