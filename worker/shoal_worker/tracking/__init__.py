"""Reports a run's progress to tools that compare runs:
`shoal.track(shoal.TensorBoard("runs/digits"))`.

`tracker`        decides which rank writes, and what belongs to which step
`spans`          the spans of a rank
`log_lines`      the warnings of a rank
`sinks`          what a tracker receives, and the interface of a sink
`delivery`       a bounded queue and a thread for each sink
`tensorboard`    a sink: TensorBoard's event files
`mlflow`         a sink: a run on an MLflow tracking server
`wandb`          a sink: a run in Weights & Biases
`opentelemetry`  a sink: traces, metrics and logs by OTLP
"""
