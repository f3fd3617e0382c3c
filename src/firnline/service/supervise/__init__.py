"""Supervision: starts runs as processes of their own, restarts those that failed, and obeys what operators want."""
