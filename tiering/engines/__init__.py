"""The adapters that connect the connector's two halves to real engines.

No other package imports them: an engine does.
"""
