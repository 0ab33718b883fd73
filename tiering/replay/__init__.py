"""Traces of requests, and their replay through the real manager and policies in simulated time."""
