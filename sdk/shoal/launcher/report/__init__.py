"""What a launcher reports about its run: progress, faults with their pauses, and final figures."""
