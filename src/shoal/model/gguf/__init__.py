"""GGUF files: header, quantised blocks, config, tokenizer, and weights by transformers' names."""
