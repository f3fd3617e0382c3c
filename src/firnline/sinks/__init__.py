"""Sinks: the contract in `base`, and one package per kind."""
