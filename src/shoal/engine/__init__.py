"""What a user holds: load a model, generate, stream, chat."""
