"""Shoal's Grafana dashboards as code: one module for each dashboard.

    PYTHONPATH=docker/grafana python -m shoal_dashboards
        # writes docker/grafana/generated
    PYTHONPATH=docker/grafana python -m shoal_dashboards --check
        # fails if the files are outdated

Every metric that a service exports has a panel, or an entry in `boards.WITHOUT_PANEL` with the
reason why it has none; a test checks this. Lines in graphs are named by instance (a worker's host
and slot, or a server's id), which stays the same when ranks change. A separate table shows the
current rank of each worker.
"""
