"""Tests of the storage backend for SGLang, over a stand-in for SGLang."""
