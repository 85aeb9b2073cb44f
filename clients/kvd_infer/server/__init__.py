"""An engine behind HTTP, as clients of OpenAI's API know it."""
