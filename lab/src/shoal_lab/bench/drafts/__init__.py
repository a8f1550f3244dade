"""What drafts bring on texts of different kinds: every system on the same text, in turn."""
