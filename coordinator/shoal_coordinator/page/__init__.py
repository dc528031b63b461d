"""The status page of a cluster for browsers, and the JSON that it reads. Decides and changes
nothing."""
