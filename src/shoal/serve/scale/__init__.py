"""Several replicas behind one address."""
