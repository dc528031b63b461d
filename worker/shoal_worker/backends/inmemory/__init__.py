"""Ranks that are threads of one process, for tests, debugging and notebooks. `backend` forms
groups. The ranks of a group exchange data in a `room`, and run in `turns`."""
