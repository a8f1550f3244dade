"""The lean executor for decoders of known kinds of layers: weights packed once, layers fused, KV written in place."""
