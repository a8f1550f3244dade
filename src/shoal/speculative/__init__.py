"""Proposers: who guesses tokens ahead."""
