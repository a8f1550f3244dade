"""Loops: other things that a step may do than verify guesses or decode one token; one file each."""
