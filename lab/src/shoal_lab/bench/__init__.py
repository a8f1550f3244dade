"""Benchmarks: Shoal and its peers on the same weights, in interleaved rounds, with the machine's roof beside them."""
