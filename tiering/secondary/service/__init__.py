"""The life of a tier's medium: opening, epochs, health, overdue loads and failures."""
