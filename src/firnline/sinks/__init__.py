"""Where results become true; the contract is in `base`."""
