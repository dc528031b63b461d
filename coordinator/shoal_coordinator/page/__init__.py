"""The status page, and the JSON that it reads: what people see of a cluster in a browser. Nothing
here decides or changes anything."""
