"""Requests and responses in OpenAI's form, with the extensions of other servers."""
