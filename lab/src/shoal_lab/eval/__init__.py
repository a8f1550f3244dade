"""Quality: what a decoding method gets right, loses and costs, on the same items as the full model."""
