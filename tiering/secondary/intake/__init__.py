"""The decision which offered blocks a tier takes: its admission policy and its budget of bytes."""
