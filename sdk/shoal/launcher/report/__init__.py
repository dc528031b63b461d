"""Reports of a launcher about its run: progress, faults with their pauses, and final figures."""
