"""Searches over branches of a sequence, and the verifiers that judge them."""
