"""What Relatum's Spark connector costs, beside the obvious ways to do the same."""
