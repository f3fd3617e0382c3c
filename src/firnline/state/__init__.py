"""Keyed state: key groups, sorted segments of changed keys, snapshots, rescaling, export."""
