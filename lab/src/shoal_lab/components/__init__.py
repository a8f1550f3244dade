"""What methods under study are made of: acceptance rules, routers and gates, forms of KV."""
