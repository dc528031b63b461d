"""Shoal's Grafana dashboards as code: one module for each dashboard.

    PYTHONPATH=docker/grafana python -m shoal_dashboards
        # writes docker/grafana/generated
    PYTHONPATH=docker/grafana python -m shoal_dashboards --check
        # fails if the files are outdated

Every metric that a service exports has a panel or stands in `boards.WITHOUT_PANEL` with the reason;
a test holds that. Lines are named by places (instance: a worker's host and slot, a server's id),
which stay when ranks are dealt anew; who has which rank is a table of its own.
"""
