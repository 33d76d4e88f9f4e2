"""Theory of learning queries and keys: the reduced gradient flow."""
