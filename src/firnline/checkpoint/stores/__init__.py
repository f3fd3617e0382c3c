"""The backends of the checkpoint store, and how one is opened."""
