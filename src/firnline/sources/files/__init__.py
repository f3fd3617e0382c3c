"""The file source: listing, planning, positions."""
