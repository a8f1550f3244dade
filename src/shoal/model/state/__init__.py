"""What recurrent layers remember of a sequence: a state that each token rewrites."""
