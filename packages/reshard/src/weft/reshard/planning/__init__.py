"""Plans as pure values: the steps from layout to layout, the costs of steps, and the search for the cheapest steps."""
