"""Plans as pure values: the steps from layout to layout, their costs, and the search for the cheapest. Starts no process."""
