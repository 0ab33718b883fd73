"""Checks of everything that only a GPU machine can show: ``make gpu``."""
