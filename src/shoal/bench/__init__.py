"""Benchmarks: Shoal and its peers on the same weights, in interleaved rounds, with the machine's roof beside them."""

from shoal.errors import needs

with needs("bench", "a benchmark"):
    import psutil  # noqa: F401 - here, so that every module below may take it for granted
