"""Long contexts: tasks on novels, with several questions on one context, whose KV is computed once and forked."""
