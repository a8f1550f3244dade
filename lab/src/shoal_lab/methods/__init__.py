"""Methods under study, one file each: they need a part that must be trained, or lose by our own tables."""
