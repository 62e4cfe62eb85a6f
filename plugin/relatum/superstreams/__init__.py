"""Super streams over AMQP 0.9.1: made, described, and published to."""
