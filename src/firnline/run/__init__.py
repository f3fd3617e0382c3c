"""One run of a pipeline: the loop, its steps, and what it keeps."""
