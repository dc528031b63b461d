"""Status page of a cluster for browsers, and the JSON that it reads. The page decides and changes
nothing."""
