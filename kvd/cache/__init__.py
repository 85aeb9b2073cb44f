"""What the cache knows. Plain classes that decide: no I/O, no await, no clock."""
