"""What only the tests need: inputs, drivers, servers, simulated worlds."""
