"""Text corpora: reading, tokenizing, splitting, batching."""
