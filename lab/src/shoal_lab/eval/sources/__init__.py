"""Data sets as items: how each is read, turned into prompts, and split into parts. One data set per file."""
