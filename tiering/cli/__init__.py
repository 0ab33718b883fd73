"""The command line ``kv-tiering``, one module per command. No other room imports it."""
