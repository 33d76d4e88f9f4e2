"""Where runs execute: local processes or a Ray cluster."""
