"""A run's progress, reported to tools for comparing runs:
`shoal.track(shoal.TensorBoard("runs/digits"))`.

`tracker`      which rank writes, and what belongs to which step; what a sink is
`tensorboard`  a sink: TensorBoard's event files
`mlflow`       a sink: a run on an MLflow tracking server
"""
