"""Components under study: acceptance rules, routers, gates, formats of KV."""
