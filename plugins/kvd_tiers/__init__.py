"""kvd's own tiers, one module each."""
