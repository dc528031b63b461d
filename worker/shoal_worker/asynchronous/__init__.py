"""The parts of asynchronous training: a worker's side of the parameter servers."""
