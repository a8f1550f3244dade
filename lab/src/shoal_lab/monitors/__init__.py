"""Monitors of languages, which say what may follow in an answer."""
