"""The truth of one epoch: the checkpoint, its durable form, and the ledger of epochs."""
