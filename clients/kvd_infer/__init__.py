"""The reference inference client: paged attention over leased pages, Hugging Face models."""
