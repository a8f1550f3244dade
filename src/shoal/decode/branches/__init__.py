"""Searches over branches of a row, and who judges them."""
