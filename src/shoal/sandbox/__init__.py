"""Processes for code that a model wrote, and for work that may hang, crash or use up the memory."""
