"""The relationship table over JDBC."""
