"""qkflow: attention whose queries and keys move."""
