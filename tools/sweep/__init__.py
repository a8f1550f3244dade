"""Tiny random models of every causal type of transformers, and whether Shoal decodes them right or refuses them."""
