"""Requests and answers in the forms of OpenAI and of other servers."""
