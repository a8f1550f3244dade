"""How guesses are accepted."""
