"""Several models behind one address: which there are, which of them are in memory, and who answers a request."""
