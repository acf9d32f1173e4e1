"""Pipeline schedules as values: what each rank does, in order, on an axis of time. No torch, no processes."""
