"""Where generation ends, and the text and bytes of tokens."""
