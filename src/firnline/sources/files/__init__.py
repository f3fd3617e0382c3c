"""Files as a source: listing, planning, position."""
