"""A decoder as a stack of layers, its KV cache, and how some of the layers run on some of the tokens."""
