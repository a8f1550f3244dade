"""One step of decoding and what is kept of it: trees, acceptance, stopping, the loop, the ledger."""
