"""Shoal inside other people's tools: each file speaks one tool's conventions."""
