"""The command `relatum` with its subcommands. No other package imports this package."""
