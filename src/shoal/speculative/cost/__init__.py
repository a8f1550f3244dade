"""How much to guess, and when not to."""
