"""What requests and models take in memory, known before they run."""
