"""The command `relatum` with its subcommands. It is the topmost package: no other package imports it."""
