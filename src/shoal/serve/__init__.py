"""A server of one model or several, as OpenAI, Anthropic and Ollama have it.

Needs the extra `serve`; only `shoal serve` imports it.
"""
