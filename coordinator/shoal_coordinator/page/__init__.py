"""Status page of a cluster for browsers, and the JSON that the page reads. The page is
read-only."""
