"""The command `relatum`: the application, and the commands that span rooms (`read`, `status`, `prune`, `up`).

All others are in the rooms and packages that they are of. Each is found through the entry-point group
`relatum.commands`, and imported when it is run: the application imports none of them.
"""

from relatum.command._app import complete_app, main

__all__ = ["complete_app", "main"]
