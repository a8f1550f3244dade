"""Options that commands share, and their parsing."""
