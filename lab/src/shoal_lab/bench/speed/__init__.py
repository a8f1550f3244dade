"""Speed of decoding, of prompts, of single forwards and of loading: Shoal and other software in interleaved rounds."""
