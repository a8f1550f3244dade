"""Data sets as items: how each is read, put to a model, and split into parts. One data set per file."""
