"""A launcher's account of its run: progress, faults with their pauses, and final figures."""
