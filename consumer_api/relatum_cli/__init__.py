"""The command `relatum`: all its subcommands, above everything else. Nothing imports it."""
