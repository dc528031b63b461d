"""Pipeline parallelism: a model cut into stages, and torch's schedules carried out over any process group. No strategy and no session
here."""
