"""What a run will need and how its time splits, said before any device is there."""
