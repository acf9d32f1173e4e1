"""matmul, linear and the products that go with them."""
