"""The contracts and plain values that every other package uses. Imports only the errors."""
