"""The bytes of streams and messages, without input or output: frames, chunks, AMQP 1.0 sections."""
