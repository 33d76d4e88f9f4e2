"""Coupled query-key dynamics: drift and kick on (q, k)."""
