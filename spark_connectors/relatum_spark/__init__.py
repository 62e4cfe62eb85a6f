"""The place of Relatum's Spark connector; this release holds no Spark code yet."""

__all__: list[str] = []
