"""Tests in the real LMCache (``make test-lmcache``)."""
