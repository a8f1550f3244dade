"""An OpenAI-compatible server over one engine. Needs the extra `serve`; imported by `shoal serve` alone."""
