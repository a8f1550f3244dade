"""Keys and values: the cache, one layer of it, and the forms they lie in."""
