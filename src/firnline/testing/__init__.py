"""What tests build upon: simulated worlds and their exploration."""
