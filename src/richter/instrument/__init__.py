"""Everything between a user's model and its rows, in the order in which data flows."""
