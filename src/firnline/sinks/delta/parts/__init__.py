"""Delta tables with a template: one sink with many parts, each a table of its own."""
