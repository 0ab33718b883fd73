"""Tests in the real SGLang (``make test-sglang``)."""
