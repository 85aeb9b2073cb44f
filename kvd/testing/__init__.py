"""Shipped for whoever tests against kvd or embeds it."""
