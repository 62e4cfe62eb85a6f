"""The wire formats, without I/O: frames, chunks and sessions of the stream protocol, and AMQP 1.0's encoding."""
