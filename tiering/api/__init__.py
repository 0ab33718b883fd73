"""The contracts and the plain values that every other package uses.  Imports nothing of the framework but the errors."""
