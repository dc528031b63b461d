"""Ranks that are threads of one process, for tests, debugging and notebooks. `backend` forms
groups, whose ranks meet in a `room` and take `turns`."""
