"""Moving tensors from layout to layout: `reshard`, the plan's executor and the collectives. Knows no gradients' sums."""
