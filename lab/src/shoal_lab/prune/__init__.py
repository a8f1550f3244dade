"""Smaller checkpoints written from larger ones: folders and GGUF files."""
