"""Topologies: pipelines that read what others write, and snapshots of all of them at one instant."""
