"""Speed of decoding, prefill, single forwards and loading: Shoal and other software in interleaved rounds."""
