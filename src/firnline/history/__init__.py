"""A pipeline's history: looking at it, keeping a point of it, going back in it, starting over."""
