"""The lean executor for Llama-shaped decoders: weights packed once, layers fused, KV written in place."""
