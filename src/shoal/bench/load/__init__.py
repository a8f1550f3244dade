"""Load on servers: requests that come at a rate or as fast as they are answered, and what the clients saw of it.

Everything goes over OpenAI's HTTP face, so that any server can be measured.
"""

from shoal.errors import needs

with needs("bench", "a load on a server"):
    import httpx  # noqa: F401 - here, so that every module below may take it for granted
