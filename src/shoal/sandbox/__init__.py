"""Work that is kept apart in processes: code that a model wrote, and what may hang, crash or take all memory."""
