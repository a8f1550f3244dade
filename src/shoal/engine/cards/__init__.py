"""What is known of a model: its layers, how it was measured, which methods pay."""
