"""Tests of the explanation of misses."""
