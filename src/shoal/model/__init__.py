"""A decoder as a stack of layers, its KV cache, and how a forward runs some of the layers on some of the tokens."""
