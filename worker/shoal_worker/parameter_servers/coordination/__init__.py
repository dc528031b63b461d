"""A worker's job as the coordinator knows it. Does not call the parameter servers.

- `job`: the worker's identity and generation, and the addresses of the servers. `server_waits`:
  time spent waiting for servers, which heartbeats report.
- `leases`: batches leased from the coordinator.
- `own_cluster`: a coordinator and a server, for a script that runs without a cluster.
"""
