"""How shoal-reference is made: its training text, its training, and the problems held out from it."""
