"""Found by Spark by its name, so that `spark.read.format("rabbitmq_streams")` works without `register`."""
