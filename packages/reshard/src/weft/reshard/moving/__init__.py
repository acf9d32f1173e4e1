"""Moving tensors from layout to layout: `reshard`, the executor of plans and the collectives."""
