"""The ParameterServer service on grpc.aio: requests parsed into domain types at the door, streams
taken apart, answers put together."""
