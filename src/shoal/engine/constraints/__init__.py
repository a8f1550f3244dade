"""What an answer must look like, token by token."""
