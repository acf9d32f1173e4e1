"""What the custom ops of several rooms need where torch.compile traces them on DTensors."""
