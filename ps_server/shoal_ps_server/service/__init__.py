"""The ParameterServer service on grpc.aio: parses requests, splits streams into parts, and composes
responses."""
