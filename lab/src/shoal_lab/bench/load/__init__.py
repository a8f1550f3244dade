"""Load on servers: requests that come at a rate or as fast as they are answered, and what the clients saw of it.

Everything goes over OpenAI's HTTP face, so that any server can be measured.
"""
