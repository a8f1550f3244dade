"""An OpenAI-compatible server for one engine. Needs the extra `serve`; only `shoal serve` imports it."""
