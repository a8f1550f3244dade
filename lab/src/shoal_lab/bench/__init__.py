"""Benchmarks: Shoal and other software on the same weights, in interleaved rounds, beside the memory bandwidth."""
