"""Drafters of methods under study."""
