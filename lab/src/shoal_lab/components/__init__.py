"""Components of methods under study: acceptance rules, routers and gates, formats of KV."""
