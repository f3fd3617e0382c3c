"""Savepoints: create, list, dispose."""
