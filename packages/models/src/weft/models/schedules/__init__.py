"""Pipeline schedules as values: each rank's actions, in order and in time. No torch, no processes."""
