"""Requests that come and go, and the batches that decode them."""
