"""A worker's job as the coordinator sees it. Does not call the parameter servers.

- `job`: the worker's identity and generation, and the addresses of the servers. `server_waits`: how
  long the worker has been waiting for servers, as reported by its heartbeats.
- `leases`: batches leased from the coordinator.
- `own_cluster`: a coordinator and a server, started for a script that runs without a cluster.
"""
