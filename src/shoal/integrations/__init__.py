"""Adapters to other tools: each file follows the conventions of one tool."""
