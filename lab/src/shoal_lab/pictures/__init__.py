"""A small LLaVA."""
