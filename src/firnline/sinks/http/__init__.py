"""HTTP: batches of rows are posted to a URL, at least once; a head in the pipeline's home says what was answered."""
