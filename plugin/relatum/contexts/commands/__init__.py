"""`relatum affinity` and `relatum contexts`, imported when one of them is run."""
