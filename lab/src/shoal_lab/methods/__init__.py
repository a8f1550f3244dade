"""Methods under study, one file each: they need a trained component, or lose by our own tables."""
