"""Valkey and Redis servers."""
