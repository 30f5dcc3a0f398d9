"""A study: runs that differ in residual rule, rounds, seed or whatever else, and the table of their losses."""
