"""What evaluations found: the result file, its protocol, and comparisons of results."""
