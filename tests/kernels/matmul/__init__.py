"""matmul, linear and related products."""
