"""Statistics of paired runs."""
