"""Traces of requests, and their replay through the real manager and policies in simulated time.

The commands import it, and the connector imports its recorder of traces.
"""
