"""Random work under random signals: `python -m tests.stress [PART]`, or `make stress PART=…`."""
