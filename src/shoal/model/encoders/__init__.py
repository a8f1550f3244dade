"""Encoders beside decoders: what reads a source, its tensors by name, and its matrices on the kernels."""
