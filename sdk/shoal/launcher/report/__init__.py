"""Account of a launcher's run: progress, faults with their pauses, and final figures."""
