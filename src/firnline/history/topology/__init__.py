"""Topologies of pipelines: what flows between their members; snapshots and restores of all of them."""
