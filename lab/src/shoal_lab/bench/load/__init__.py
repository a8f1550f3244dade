"""Load tests of servers: requests come at a rate, or each client waits for its answer, and the clients keep the times.

Everything goes through OpenAI's HTTP API, so that any server can be measured.
"""
