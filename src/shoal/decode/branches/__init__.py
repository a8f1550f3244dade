"""Searches over branches of a row, and the verifiers that judge them."""
