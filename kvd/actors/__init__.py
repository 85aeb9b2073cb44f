"""What runs."""
