"""Speed of drafting on texts of different kinds: every system decodes the same texts in turn."""
