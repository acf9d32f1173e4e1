"""What runs: DTensors, process groups, collectives, and plans carried out on them."""
