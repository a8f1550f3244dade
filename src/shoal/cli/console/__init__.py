"""What a chat in the terminal reads and shows: lines, files, calls of tools."""
