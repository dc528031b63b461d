"""A run's course in tools that people compare runs with: `shoal.track(shoal.TensorBoard("runs/digits"))`."""
