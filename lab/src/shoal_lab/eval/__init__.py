"""Quality: what a way of decoding gets right, loses and costs, on the same items as the full model."""
