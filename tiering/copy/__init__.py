"""Copies between the accelerator and primary rows."""
