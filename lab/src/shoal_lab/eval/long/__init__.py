"""Long contexts: tasks over novels, several questions on one context, whose KV is computed once and forked."""
