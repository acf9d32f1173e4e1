"""What runs on processes: groups and meshes, plans carried out on DTensors, and synchronized gradients."""
