"""Where code that a model wrote is run: without network, files, or a way to others, for a limited time."""
