"""`relatum spark`: the pipelines as commands, found through an entry point."""

from relatum_spark.command._app import app

__all__ = ["app"]
