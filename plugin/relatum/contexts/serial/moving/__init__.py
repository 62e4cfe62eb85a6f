"""Moving contexts between partitions: what operators call, the steps of a move, and who performs them."""
