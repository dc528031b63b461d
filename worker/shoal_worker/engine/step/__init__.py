"""What a pass does and changes in a step, and how its changes are summed, kept or undone."""
