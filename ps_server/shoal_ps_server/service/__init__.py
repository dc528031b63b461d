"""ParameterServer service on grpc.aio: parses requests into domain types, splits streams into
parts, and assembles answers."""
