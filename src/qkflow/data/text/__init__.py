"""Text corpora: reading, splitting, tokenizing, caching and batching."""
