"""Checkpoints whose matrices are stored in the numbers of other tools."""
