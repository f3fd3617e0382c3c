"""Where records come from; the contract is in `base`."""
