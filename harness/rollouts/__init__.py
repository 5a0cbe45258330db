"""Episodes, groups and their records."""
