"""Operators: what stands between sources and sinks and remembers."""
