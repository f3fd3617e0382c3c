"""Epochs that read nothing: rollback, fresh start, restore, rescale, import."""
