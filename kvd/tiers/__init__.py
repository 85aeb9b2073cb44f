"""What a plugin implements, and how it is found."""
