"""Loops: steps that do something else than verify guesses or decode one token."""
