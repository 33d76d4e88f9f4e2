"""Theory of query-key learning."""
